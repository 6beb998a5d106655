"""The numbers that decide a plan: one frozen, self-validating record, independent of any tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kda_tl.errors import InputError

DTYPES = ("bf16", "fp16", "fp32")
GATES = ("log", "softplus", "safe")
BETAS = ("plain", "sigmoid", "sigmoid2")
DIRECTIONS = ("fwd", "bwd")  # of an operator of whole sequences
PASSES = (*DIRECTIONS, "step")  # the last is that of a recurrent operator
RANKS = (1, 2, 4)
# What a call of a recurrent operator may have besides what others have; see kda_tl.templates.portable.decode_step
OPTIONS = (
    "has_g",  # log decays
    "key_gate",  # log decays a key channel beside g
    "value_gate",  # log decays a value channel beside g
    "has_beta",  # step sizes, otherwise 1
    "wide_beta",  # a step size a value channel
    "ragged",  # sequences of several lengths, packed
    "pooled",  # sequences say which slot holds their state
    "accepted",  # how many tokens of the last call were accepted, which decides on the slot
    "separate",  # states are written to other slots than they are read from
    "updates",  # states are written back
    "each_token",  # the state after each token is, to a slot of its own
    "snapshots",  # states after every token go to a buffer
    "placed",  # sequences say to which of its rows
    "tree",  # tokens say which one they follow
    "unaligned",  # states do not lie on boundaries of 16 bytes
)
_CHOICES: dict[str, tuple[object, ...]] = {"dtype": DTYPES, "g_dtype": DTYPES, "beta_dtype": DTYPES}
_CHOICES |= {"gate": GATES, "beta": BETAS, "direction": PASSES, "rank": RANKS}
_CHOICES |= {"state_dtype": DTYPES}
MAX_DIM = {"K": 256, "V": 512}  # of heads: a block has all of K, value channels are parted among blocks
MAX_HEADS = 65535  # an axis of a launch's grid
LOWER_BOUND_RANGE = (-5.0, 0.0)  # FLA's range: 16 tokens of exp(-5) still fit an fp32 exponent


def pad_dim(dim: int) -> int:
    """Width of a head dimension in intermediates: the next multiple of 32, zero filled.

    The matrix unit's tiles and 16-byte accesses then never see an odd width; only the stages that read the
    caller's tensors or write results know the true one.
    """
    return -(-dim // 32) * 32


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call of an operator, as far as it can influence which kernels run.

    Raises InputError if a field is outside its range.
    """

    H: int  # query/key heads
    HV: int  # value heads, a multiple of H (grouped value attention if larger)
    K: int  # key head dimension, 1 to 256
    V: int  # value head dimension, 1 to 512
    tokens: int  # in all, B * T
    sequences: int = 1  # B, or len(cu_seqlens) - 1
    longest: int = 0  # tokens of the longest sequence
    dtype: str = "bf16"  # element type of q, k, v and o: bf16, fp16 or fp32
    # "log" (g is the log decay), "softplus" (-exp(A_log) * softplus(g + dt_bias)) or
    # "safe" (lower_bound * sigmoid(exp(A_log) * (g + dt_bias)))
    gate: str = "log"
    has_A_log: bool = False  # A_log is given (always, for "softplus")
    has_dt_bias: bool = False
    beta: str = "plain"  # "plain", "sigmoid" or "sigmoid2" (2 * sigmoid)
    l2norm: bool = False  # q and k are normalised over K in the kernels
    varlen: bool = False  # sequences are packed by cu_seqlens
    initial_state: bool = False  # a state before the first token is given
    final_state: bool = False  # the state after the last token is returned
    intermediate_states: bool = False  # the states before every chunk are returned
    state_v_first: bool = False  # states are [V, K] instead of [K, V]
    g_dtype: str = ""  # element type of g, as dtype unless given
    beta_dtype: str = ""  # element type of beta, as dtype unless given
    scalar_gate: bool = False  # a value head has one gate for all its key channels (Gated DeltaNet), not one a channel
    # Rows a token, 1, 2 or 4: keys and values with which one token corrects the state at once, see
    # kda_tl.reference.recurrent_kda. Tokens and lengths are then counted in rows.
    rank: int = 1
    state_dtype: str = "fp32"  # element type of the states that a recurrent operator is given
    options: tuple[str, ...] = ()  # of a recurrent operator: those of OPTIONS that its call has, in their order
    operator: str = "chunk_kda"
    direction: str = "fwd"  # or "bwd", "step": the pass

    def __post_init__(self) -> None:
        set_default = object.__setattr__
        if not self.longest:
            set_default(self, "longest", -(-self.tokens // max(self.sequences, 1)))
        if not self.g_dtype:
            set_default(self, "g_dtype", self.dtype)
        if not self.beta_dtype:
            set_default(self, "beta_dtype", self.dtype)
        for name in ("H", "HV", "K", "V"):
            if (size := getattr(self, name)) < 1:
                raise InputError(f"{name} must be at least 1, got {size}.")
            if name in MAX_DIM and size > MAX_DIM[name]:
                raise InputError(f"head dimension {name}={size} is not supported: pass {MAX_DIM[name]} or less.")
            if size > MAX_HEADS:
                raise InputError(f"{name}={size} heads are not supported: pass {MAX_HEADS} or less.")
        if self.HV % self.H:
            raise InputError(
                f"HV={self.HV} value heads cannot share H={self.H} query/key heads: make HV a multiple of H."
            )
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} must be one of {', '.join(map(str, allowed))}, got {getattr(self, name)!r}.")
        if unknown := set(self.options) - set(OPTIONS):
            raise InputError(f"options must be of {', '.join(OPTIONS)}, got {', '.join(sorted(unknown))}.")
        set_default(self, "options", tuple(name for name in OPTIONS if name in self.options))
        if self.gate == "softplus" and not self.has_A_log:
            raise InputError("the softplus gate needs A_log: pass A_log of shape [HV], or a lower_bound.")
        if self.tokens % self.rank:
            raise InputError(f"{self.tokens} rows cannot be tokens of {self.rank} rows each.")

    def has(self, tensor: str) -> bool:
        """Whether an operand of pipelines plays a part: those of a gate that is not computed do not."""
        return {"A_log": self.has_A_log, "dt_bias": self.has_dt_bias, "h0": self.initial_state}.get(tensor, True)

    @property
    def chunked(self) -> bool:
        """Whether its pass takes tokens in chunks, whose size is a choice then; a step takes them one by one."""
        return self.direction in DIRECTIONS

    @property
    def group(self) -> int:
        """Value heads per query/key head."""
        return self.HV // self.H

    @property
    def grouped(self) -> bool:
        """Whether value heads share query/key heads."""
        return self.group > 1

    @property
    def paired(self) -> bool:
        """Whether two do: their sums are the same in either order, so any block may add its own."""
        return self.group == 2

    @property
    def parted(self) -> bool:
        """Whether more than two do, each of which has a part of its own where they are summed."""
        return self.group > 2

    @property
    def KP(self) -> int:
        """K as stored in intermediates."""
        return pad_dim(self.K)

    @property
    def VP(self) -> int:
        """V as stored in intermediates."""
        return pad_dim(self.V)

    @property
    def G(self) -> int:
        """Gates of a value head: K, or 1 for a scalar gate."""
        return 1 if self.scalar_gate else self.K

    @property
    def GP(self) -> int:
        """G as stored in intermediates: a scalar is not padded."""
        return 1 if self.scalar_gate else self.KP

    @property
    def bounded_gate(self) -> bool:
        """True if no token's log decay is below -5 nats, by construction of the gate."""
        return self.gate == "safe"

    @property
    def key(self) -> str:
        """Readable name, e.g. ``chunk_kda-fwd-H32-HV32-K128-V128-bf16-safe-n1-tokens8192``."""
        flags = {
            "scalar": self.scalar_gate,
            f"r{self.rank}": self.rank > 1,
            "l2norm": self.l2norm,
            self.beta: self.beta != "plain",
            "varlen": self.varlen,
            "h0": self.initial_state,
            "ht": self.final_state,
            "states": self.intermediate_states,
            "vk": self.state_v_first,
            f"state_{self.state_dtype}": self.state_dtype != "fp32",
        } | dict.fromkeys(self.options, True)
        call = f"{self.operator}-{self.direction}-H{self.H}-HV{self.HV}-K{self.K}-V{self.V}-{self.dtype}-{self.gate}"
        return "-".join([call, *(name for name, on in flags.items() if on), f"n{self.sequences}-tokens{self.tokens}"])

    def without_lengths(self) -> Problem:
        """The part of the problem that kernels are specialised for: lengths and batch are run-time values."""
        return replace(self, tokens=0, sequences=0, longest=0, varlen=False)
