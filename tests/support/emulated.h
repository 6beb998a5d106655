// CUDA that TileLang generates for sm_90a, as C++ for the host: threads of a block are fibers that take turns, and the
// instructions of warps and warpgroups gather their operands as PTX lays them out. Written for the kernels that
// tests/support/emulate.py runs; an instruction that is not here does not compile. Copies to shared memory are done when they
// are asked for, and products at once: races, missing barriers and fences are not found.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)
#define __align__(n)
#define __forceinline__ inline
#define CUDART_INF_F INFINITY

using std::max;
using std::min;
// Of a number and what is none, CUDA's give the number
inline float max(float a, float b) { return std::fmax(a, b); }
inline float min(float a, float b) { return std::fmin(a, b); }
typedef unsigned char uchar;
struct int3_ {
  int x, y, z;
};
static int3_ threadIdx, blockIdx;
alignas(1024) unsigned char buf_dyn_shmem[256 << 10];

// Vectors: not aligned as CUDA's, since what lies in registers there lies on the stack here
#define VECTORS(T, N)                                            \
  struct N##1 { T x; };                                          \
  struct N##2 { T x, y; };                                       \
  struct N##4 { T x, y, z, w; };                                 \
  inline N##1 make_##N##1(T x) { return {x}; }                   \
  inline N##2 make_##N##2(T x, T y) { return {x, y}; }           \
  inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(float, float)
VECTORS(int, int)
VECTORS(unsigned, uint)

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  bfloat16_t(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    bits = value != value ? 0x7fff : (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  }
  operator float() const {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
  }
};
typedef bfloat16_t __nv_bfloat16;
struct __nv_bfloat162 {
  bfloat16_t x, y;
};
inline unsigned __pack_nv_bfloat162(bfloat16_t x, bfloat16_t y) { return unsigned(y.bits) << 16 | x.bits; }
inline unsigned __pack_half2(bfloat16_t x, bfloat16_t y) { return __pack_nv_bfloat162(x, y); }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {x.x, x.y}; }

// Threads
namespace fibers {
struct Barrier {
  int count = 0, generation = 0;
};
static ucontext_t scheduler;
static std::vector<ucontext_t> contexts;
static std::vector<std::vector<char>> stacks;
static std::vector<bool> done;
static Barrier block, warps[32], named[16];
static std::function<void()> body;
static int threads;
static uint64_t slots[1024][8];

inline void yield() {
  int own = threadIdx.x;
  swapcontext(&contexts[own], &scheduler);
}
inline void wait(Barrier& barrier, int count) {
  int generation = barrier.generation;
  if (++barrier.count == count) {
    barrier.count = 0;
    barrier.generation++;
  } else {
    while (barrier.generation == generation) yield();
  }
}
inline void wait_warp() { wait(warps[threadIdx.x / 32], 32); }
static void enter() {
  body();
  done[threadIdx.x] = true;
  swapcontext(&contexts[threadIdx.x], &scheduler);
}
inline void run(int blocks, int count, std::function<void()> kernel) {
  threads = count;
  body = kernel;
  contexts.resize(count);
  stacks.assign(count, std::vector<char>(512 << 10));
  for (int b = 0; b < blocks; b++) {
    blockIdx = {b, 0, 0};
    memset(buf_dyn_shmem, 0xff, sizeof buf_dyn_shmem);  // NaN
    done.assign(count, false);
    for (int t = 0; t < count; t++) {
      getcontext(&contexts[t]);
      contexts[t].uc_stack.ss_sp = stacks[t].data();
      contexts[t].uc_stack.ss_size = stacks[t].size();
      contexts[t].uc_link = nullptr;
      makecontext(&contexts[t], enter, 0);
    }
    for (int left = count, turns = 0; left; turns++) {
      if (turns > 1000000) abort();  // threads wait for each other
      for (int t = 0; t < count; t++) {
        if (done[t]) continue;
        threadIdx = {t, 0, 0};
        swapcontext(&scheduler, &contexts[t]);
        left -= done[t];
      }
    }
  }
}
}  // namespace fibers
inline void __syncthreads() { fibers::wait(fibers::block, fibers::threads); }
inline void __syncwarp() { fibers::wait_warp(); }
inline void __threadfence() {}
inline void cudaTriggerProgrammaticLaunchCompletion() {}
template <typename T>
void AtomicStore(T* to, T value, int) {
  *to = value;
}

namespace tl {
enum class DataType { kBFloat16, kFloat32, kTensorFloat32 };
inline int lane() { return threadIdx.x % 32; }

// What each lane of the warp gives, until all have read it
struct Gathered {
  uint64_t (*of)[8];
  template <class... T>
  explicit Gathered(T... values) : of(&fibers::slots[threadIdx.x / 32 * 32]) {
    uint64_t given[] = {uint64_t(values)...};
    memcpy(of[lane()], given, sizeof given);
    fibers::wait_warp();
  }
  ~Gathered() { fibers::wait_warp(); }
  float half(int lane, int word, int part) const {
    bfloat16_t x;
    x.bits = of[lane][word] >> (16 * part);
    return x;
  }
};
template <class T>
T shfl(T x, int from) {
  uint64_t word = 0;
  memcpy(&word, &x, sizeof x);
  Gathered gathered(word);
  memcpy(&x, &gathered.of[from < 0 || from > 31 ? lane() : from][0], sizeof x);
  return x;
}
template <class T>
T shfl_xor(T x, int offset) {
  return shfl(x, lane() ^ offset);
}

struct SumOp {
  template <class T>
  T operator()(T a, T b) const { return a + b; }
};
struct MinOp {
  template <class T>
  T operator()(T a, T b) const { return a < b ? a : b; }
};
struct MaxOp {
  template <class T>
  T operator()(T a, T b) const { return a > b ? a : b; }
};
template <int N>
struct NamedBarrier {
  template <int id>
  static void sync() { fibers::wait(fibers::named[id], N); }
};
template <class Op, int count, int scale, int first = 0, class Barrier = void>
struct AllReduce {
  template <class T>
  static T run(T x, T* room = nullptr) {
    constexpr int offset = count / 2;
    if constexpr (offset >= 32) {
      Barrier::template sync<1>();
      room[threadIdx.x - first] = x;
      Barrier::template sync<2>();
      x = Op()(x, room[(threadIdx.x - first) ^ offset]);
    } else {
      x = Op()(x, shfl_xor(x, offset));
    }
    if constexpr (offset == scale) return x;
    else return AllReduce<Op, offset, scale, first, Barrier>::run(x, room);
  }
};

template <int N>
void cp_async_gs(const void* shared, const void* global) { memcpy((void*)shared, global, N); }
template <int N>
void cp_async_gs_conditional(const void* shared, const void* global, bool inside) {
  inside ? (void)memcpy((void*)shared, global, N) : (void)memset((void*)shared, 0, N);
}
inline void cp_async_commit() {}
template <int N>
void cp_async_wait() {}
inline void fence_proxy_async() {}
inline void warpgroup_arrive() {}
inline void warpgroup_commit_batch() {}
template <int N = 0>
void warpgroup_wait() {}
template <int N = 0>
void wait_wgmma() {}
template <class T>
void warpgroup_fence_operand(T*, int) {}

template <class T>
T from_uint1(uint1 x) {
  T value;
  memcpy(&value, &x, 4);
  return value;
}
inline uint1 to_uint1(__nv_bfloat162 x) { return {__pack_nv_bfloat162(x.x, x.y)}; }
inline __nv_bfloat162 mul2(__nv_bfloat162 a, __nv_bfloat162 b) { return {float(a.x) * b.x, float(a.y) * b.y}; }
inline __nv_bfloat162 add2(__nv_bfloat162 a, __nv_bfloat162 b) { return {float(a.x) + b.x, float(a.y) + b.y}; }

// Matrices of 8 x 8: lane l names row l % 8 of matrix l / 8, and holds of every matrix two elements of row l / 4
inline void ptx_ldmatrix_x4(const void* shared, void* local) {
  Gathered gathered((uint64_t)shared);
  for (int m = 0; m < 4; m++)
    memcpy((char*)local + 4 * m, (char*)gathered.of[8 * m + lane() / 4][0] + lane() % 4 * 4, 4);
}
inline void ptx_stmatrix_m8n8_x4(const void* shared, int a, int b, int c, int d) {
  Gathered gathered((uint32_t)a, (uint32_t)b, (uint32_t)c, (uint32_t)d);
  for (int n = 0; n < 4; n++) memcpy((char*)shared + 4 * n, &gathered.of[lane() % 8 * 4 + n][lane() / 8], 4);
}

// Bits that a product of tf32 does not see
inline float cut(uint64_t bits) {
  uint32_t kept = bits & 0xffffe000;
  float value;
  memcpy(&value, &kept, 4);
  return value;
}
// m16n8k16 of bf16 and m16n8k8 of tf32, row by column
template <DataType A, DataType B, DataType C, int M, int N, int K, bool, bool>
void mma_sync(float* c, const unsigned* a, const unsigned* b) {
  static_assert(M == 16 && N == 8 && C == DataType::kFloat32);
  if constexpr (A == DataType::kTensorFloat32) {
    static_assert(K == 8);
    Gathered gathered(a[0], a[1], a[2], a[3], b[0], b[1]);
    for (int e = 0; e < 4; e++) {
      int row = lane() / 4, column = lane() % 4 * 2 + e % 2;
      for (int k = 0; k < 8; k++)
        c[e] += cut(gathered.of[row * 4 + k % 4][e / 2 + k / 4 * 2]) * cut(gathered.of[column * 4 + k % 4][4 + k / 4]);
    }
    return;
  }
  static_assert(A == DataType::kTensorFloat32 || A == DataType::kBFloat16 && K == 16);
  Gathered gathered(a[0], a[1], a[2], a[3], b[0], b[1]);
  for (int e = 0; e < 4; e++) {
    int row = lane() / 4, column = lane() % 4 * 2 + e % 2;
    for (int k = 0; k < 16; k++)
      c[e] += gathered.half(row * 4 + k % 8 / 2, e / 2 + k / 8 * 2, k % 2) *
              gathered.half(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
  }
}

// Operands of warpgroups in shared memory: swizzled tiles of rows of 128, 64 or 32 bytes
struct GmmaDescriptor {
  uint64_t word;
  operator uint64_t() const { return word; }
};
template <int layout, int leading, int stride, class T>
void initialize_wgmma_descriptor(GmmaDescriptor& descriptor, T* start) {
  uint64_t at = (unsigned char*)start - buf_dyn_shmem;
  descriptor.word = at >> 4 | uint64_t(leading) << 32 | uint64_t(stride) << 46 | uint64_t(layout) << 60;
}
inline float read_operand(uint64_t descriptor, bool transposed, int outer, int k) {
  uint64_t layout = descriptor >> 60, start = (descriptor & 0xffffffff) << 4;
  uint64_t leading = (descriptor >> 32 & 0x3fff) << 4, stride = (descriptor >> 46 & 0x3fff) << 4;
  int width = 256 >> layout, bits = 4 - layout;  // bytes of a row; of its address, those that are swizzled
  if (layout < 1 || layout > 3) abort();
  uint64_t at = start;
  if (transposed) at += outer % (width / 2) * 2 + outer / (width / 2) * leading + k % 8 * width + k / 8 * stride;
  else at += k * 2 + outer % 8 * width + outer / 8 * stride;
  at ^= (at >> 7 & ((1 << bits) - 1)) << 4;
  return *(bfloat16_t*)(buf_dyn_shmem + at);
}
template <int N, bool transposed, class Left>
void multiply(Left left, uint64_t b, uint32_t* c, int keep) {
  for (int e = 0; e < N / 2; e++) {
    float sum = keep ? ((float*)c)[e] : 0.0f;
    int row = threadIdx.x % 128 / 32 * 16 + lane() / 4 + e % 4 / 2 * 8, column = e / 4 * 8 + lane() % 4 * 2 + e % 2;
    for (int k = 0; k < 16; k++) sum += left(row, k) * read_operand(b, transposed, column, k);
    ((float*)c)[e] = sum;
  }
}
template <DataType, DataType, DataType, int M, int N, int K, bool tA, bool tB, int, int>
void wgmma_ss(uint64_t a, uint64_t b, uint32_t* c, int keep) {
  static_assert(M == 64 && K == 16);
  multiply<N, tB>([=](int row, int k) { return read_operand(a, tA, row, k); }, b, c, keep);
}
template <DataType, DataType, DataType, int M, int N, int K, bool, bool tB, int, int>
void wgmma_rs(const uint32_t* a, uint64_t b, uint32_t* c, int keep) {
  static_assert(M == 64 && K == 16);
  Gathered gathered(a[0], a[1], a[2], a[3]);
  auto left = [&](int row, int k) {
    return gathered.half(row % 8 * 4 + k % 8 / 2, row % 16 / 8 + k / 8 * 2, k % 2);
  };
  multiply<N, tB>(left, b, c, keep);
}
}  // namespace tl

template <class T>
T __shfl_up_sync(unsigned, T x, int offset, int) { return tl::shfl(x, tl::lane() - offset); }
template <class T>
T __shfl_down_sync(unsigned, T x, int offset, int) { return tl::shfl(x, tl::lane() + offset); }
template <class T>
T __shfl_sync(unsigned, T x, int from, int) { return tl::shfl(x, from); }
template <class T>
T __shfl_xor_sync(unsigned, T x, int offset, int) { return tl::shfl_xor(x, offset); }
// The prelude of kernels of Gated DeltaNet's pairs
inline void keep(const void*, const void*) {}
inline void store_block_transposed(void* shared, const void* values) {
  const unsigned* pairs = (const unsigned*)values;
  tl::Gathered gathered(pairs[0], pairs[1], pairs[2], pairs[3]);
  int matrix = tl::lane() / 8, column = tl::lane() % 8;
  for (int row = 0; row < 8; row++)
    ((uint16_t*)shared)[row] = gathered.of[row * 4 + column / 2][matrix] >> (16 * (column % 2));
}
inline void store_block(void* shared, const void* values) {
  const int* pairs = (const int*)values;
  tl::ptx_stmatrix_m8n8_x4(shared, pairs[0], pairs[1], pairs[2], pairs[3]);
}
