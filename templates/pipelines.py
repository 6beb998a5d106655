"""The pipelines: which stages compute a pass, in order. ``kda-tl show --pipeline NAME`` draws how tensors flow."""

from __future__ import annotations

from kda_tl.core.pipeline import Pipeline
from kda_tl.templates.portable import (
    bwd_gate,
    bwd_intra,
    bwd_output,
    bwd_qk,
    bwd_reduce,
    bwd_state,
    bwd_wy,
    decode_step,
    fwd_gate,
    fwd_intra,
    fwd_output,
    fwd_state,
    fwd_wy,
)
from kda_tl.templates.sm90 import (
    bwd_gdn_gradients,
    bwd_gdn_merge,
    bwd_gdn_resume,
    bwd_gdn_scan,
    bwd_gdn_segment,
    bwd_gdn_states,
    bwd_gdn_walk,
    bwd_gradients,
    bwd_heads,
    bwd_merge,
    bwd_resume,
    bwd_scan,
    bwd_segment,
    decode_rows,
    fwd_gdn_attend,
    fwd_gdn_inverse,
    fwd_gdn_merge,
    fwd_gdn_pairs,
    fwd_gdn_prep,
    fwd_gdn_recurrence,
    fwd_gdn_resume,
    fwd_gdn_segment,
    fwd_merge,
    fwd_prep,
    fwd_recurrence,
    fwd_resume,
    fwd_segment,
)
from kda_tl.templates.sm90.hopper import BOUNDS, PAIRS
from kda_tl.templates.sm90.merge import MOVED
from kda_tl.templates.sm90.reach import EDGES

# Through memory: runs on every target, and each step can be looked at
_STAGED = (fwd_gate.STAGE, fwd_intra.STAGE, fwd_wy.STAGE, fwd_state.STAGE)
_STAGED_GRADIENTS = (
    bwd_output.STAGE,
    bwd_state.STAGE,
    bwd_wy.STAGE,
    bwd_intra.STAGE,
    bwd_gate.STAGE,
    bwd_qk.STAGE,
    bwd_reduce.STAGE,
)
_STAGED_RESIDUALS = ("g_cumsum", "Aqk", "Akk", "rstd", "w", "u", "kg", "qg", "h", "v_new")

# For Hopper: what a chunk does alone, then what chunks do one after the other, of whole sequences or of segments of
# them side by side: their effect, the states between them, and the rest
_CUT = (fwd_prep.STAGE, fwd_segment.STAGE, fwd_merge.STAGE)
_CUT_GDN = (fwd_gdn_prep.STAGE, fwd_segment.STAGE, fwd_merge.STAGE)
_CUT_BACK = (bwd_segment.STAGE, bwd_merge.STAGE, bwd_resume.STAGE)
_SUMS = (bwd_heads.STAGE, bwd_reduce.STAGE)
_GRADIENTS = (bwd_gradients.STAGE, *_SUMS)
_GRADIENTS_GDN = (bwd_gdn_gradients.STAGE, *_SUMS)
_CUT_PAIRS = (fwd_gdn_pairs.STAGE, fwd_gdn_segment.STAGE, fwd_gdn_merge.STAGE)
_PREPARED = tuple(fwd_prep.STAGE.outputs)
_PAIRS = (*PAIRS, *BOUNDS)
_OF_SEGMENTS = (*_PAIRS, *EDGES, *MOVED)  # and what is known between segments
_WALK_GDN = (fwd_gdn_pairs.STAGE, bwd_gdn_states.STAGE, bwd_gdn_walk.STAGE, *_SUMS)
_CUT_BACK_GDN = (bwd_gdn_segment.STAGE, bwd_gdn_merge.STAGE, bwd_gdn_resume.STAGE)
_WALK_CUT_GDN = (*_CUT_PAIRS, *_CUT_BACK_GDN, bwd_gdn_walk.STAGE, *_SUMS)
_SEGMENTS = (4, 8, 16)

PIPELINES: dict[str, Pipeline] = {
    pipeline.name: pipeline
    for pipeline in (
        Pipeline("staged", "fwd", (*_STAGED, fwd_output.STAGE)),
        Pipeline("prep_recurrence", "fwd", (fwd_prep.STAGE, fwd_recurrence.STAGE)),
        *(Pipeline(f"prep_segments_{n}", "fwd", (*_CUT, fwd_resume.STAGE), segments=n) for n in _SEGMENTS),
        Pipeline("gdn_pairs", "fwd", (fwd_gdn_pairs.STAGE, fwd_gdn_recurrence.STAGE)),
        *(
            Pipeline(
                f"gdn_pairs_segments_{n}",
                "fwd",
                (*_CUT_PAIRS, fwd_gdn_resume.STAGE),
                serial=True,
                at_once=True,
                least_chunks=64 if n < 8 else 8,  # more heads gain less by it
                segments=n,
                defaults={"fwd_gdn_pairs": fwd_gdn_pairs.PairsConfig.alone},
            )
            for n in _SEGMENTS
        ),
        Pipeline(
            "gdn_attend",
            "fwd",
            (fwd_gdn_inverse.STAGE, fwd_gdn_attend.STAGE),
            keeper="gdn_pairs",
            suits=fwd_gdn_attend.suits,
        ),
        Pipeline("gdn_recurrence", "fwd", (fwd_gdn_prep.STAGE, fwd_recurrence.STAGE)),
        *(Pipeline(f"gdn_segments_{n}", "fwd", (*_CUT_GDN, fwd_resume.STAGE), segments=n) for n in _SEGMENTS),
        Pipeline("staged_backward", "bwd", (*_STAGED, *_STAGED_GRADIENTS), _STAGED_RESIDUALS),
        Pipeline("prep_scan", "bwd", (fwd_prep.STAGE, bwd_scan.STAGE, *_GRADIENTS), _PREPARED),
        *(
            Pipeline(f"prep_scan_segments_{n}", "bwd", (*_CUT, *_CUT_BACK, *_GRADIENTS), _PREPARED, segments=n)
            for n in _SEGMENTS
        ),
        Pipeline("gdn_scan", "bwd", (fwd_gdn_pairs.STAGE, bwd_gdn_scan.STAGE, *_GRADIENTS_GDN), tuple(PAIRS)),
        *(
            Pipeline(
                name,
                "bwd",
                stages,
                residuals,
                keeps=True,
                serial=True,
                at_once=stages is _WALK_CUT_GDN,
                least_chunks=least,
                segments=n,
            )
            for name, stages, residuals, n, least in (
                ("gdn_walk", _WALK_GDN, _PAIRS, 1, 8),
                ("gdn_walk_segments_2", _WALK_GDN, _PAIRS, 2, 8),
                ("gdn_walk_told_4", _WALK_CUT_GDN, _OF_SEGMENTS, 4, 64),  # by a forward of so many segments
                ("gdn_walk_segments_4", _WALK_GDN, _PAIRS, 4, 8),
                *((f"gdn_walk_segments_{n}", _WALK_CUT_GDN, _OF_SEGMENTS, n, 8) for n in (8, 16)),
            )
        ),
        *(
            Pipeline(f"gdn_scan_segments_{n}", "bwd", (*_CUT_GDN, *_CUT_BACK, *_GRADIENTS_GDN), _PREPARED, segments=n)
            for n in _SEGMENTS
        ),
        Pipeline("decode", "step", (decode_step.STAGE,)),
        Pipeline("decode_rows", "step", (decode_rows.STAGE,)),
    )
}
