// What the host code that TileLang 0.1.15 generates asks its runtime for, on the CUDA driver alone: with this a kernel's
// binary needs tvm-ffi and the driver, and neither TileLang nor a CUDA toolkit. It is linked into every binary of a
// bundle beside the generated host code, which does the rest: checks, tensor maps' sizes, grids.
//
// It is C and asks for nothing newer than glibc 2.17, so that a binary loads on systems older than the one it was built
// on.
//
// kda_kernel, generated for each kernel, says how its device function is called.

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#if defined(__x86_64__)  // glibc 2.34 moved them into libc under new versions; these names are in every glibc
__asm__(".symver dlopen, dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#endif

// The device function's name; a letter a parameter (p pointer, t tensor map, i int32, l int64, f float); and, for each
// number that follows them, where it goes: 0 to 2 grid, 3 to 5 block, 6 bytes of dynamic shared memory; after these
// n for a kernel that lets the next one start when all of its blocks run, e for one that may start so early
// (programmatic dependent launch).
struct KdaKernel {
  const char* name;
  const char* parameters;
  const char* launch;
};
extern const struct KdaKernel kda_kernel;
extern const unsigned char kda_cubin[];

enum { kDevices = 64, kParameters = 128 };
enum { kMaxSharedBytes = 8 };  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
enum { kCarveout = 9 };        // CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
enum { kStartsEarly = 6 };     // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

typedef void* Context;
typedef void* Function;
typedef void* Module;

// CUlaunchAttribute and CUlaunchConfig
struct Attribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    int allowed;
  } value;
};
struct Launch {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  struct Attribute* attributes;
  unsigned count;
};

// Of the driver's interface (CUDA 12) as much as is called: no toolkit's headers are needed.
static struct {
  int (*get_error_string)(int, const char**);
  int (*get_context)(Context*);
  int (*get_device)(int*);
  int (*device_of)(int*, int);
  int (*retain_context)(Context*, int);
  int (*set_context)(Context);
  int (*load_module)(Module*, const void*);
  int (*get_function)(Function*, Module, const char*);
  int (*set_attribute)(Function, int, int);
  int (*launch)(const struct Launch*, Function, void**, void**);
  int (*encode_tiled)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*,
                      int, int, int, int);
} driver;

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;
static int found;  // the driver: 1 it is there, -1 it is not, 0 nobody has looked
static Function functions[kDevices];

static int fail(const char* what, int result) {
  const char* why = NULL;
  if (result && driver.get_error_string) driver.get_error_string(result, &why);
  char text[512];
  snprintf(text, sizeof text, "%s: %s%s%s", kda_kernel.name, what, why ? ": " : "", why ? why : "");
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", text);
  return -1;
}

static int look_for_driver(void) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return -1;
  struct {
    void* function;
    const char* name;
  } wanted[] = {
      {&driver.get_error_string, "cuGetErrorString"},
      {&driver.get_context, "cuCtxGetCurrent"},
      {&driver.get_device, "cuCtxGetDevice"},
      {&driver.device_of, "cuDeviceGet"},
      {&driver.retain_context, "cuDevicePrimaryCtxRetain"},
      {&driver.set_context, "cuCtxSetCurrent"},
      {&driver.load_module, "cuModuleLoadData"},
      {&driver.get_function, "cuModuleGetFunction"},
      {&driver.set_attribute, "cuFuncSetAttribute"},
      {&driver.launch, "cuLaunchKernelEx"},
      {&driver.encode_tiled, "cuTensorMapEncodeTiled"},  // the last: not in a driver before CUDA 12.0
  };
  const int count = sizeof wanted / sizeof *wanted;
  for (int i = 0; i < count; ++i) {
    void* symbol = dlsym(library, wanted[i].name);
    if (!symbol && i < count - 1) return -1;
    memcpy(wanted[i].function, &symbol, sizeof symbol);
  }
  return 1;
}

static int has_driver(void) {
  int known = __atomic_load_n(&found, __ATOMIC_ACQUIRE);
  if (known) return known > 0;
  pthread_mutex_lock(&loading);
  if (!(known = found)) __atomic_store_n(&found, known = look_for_driver(), __ATOMIC_RELEASE);
  pthread_mutex_unlock(&loading);
  return known > 0;
}

// Makes the primary context of a device current, unless one of that device is. PyTorch has done so as a rule.
static int set_device(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* out) {
  if (!has_driver()) return fail("the CUDA driver, libcuda.so.1, cannot be loaded", 0);
  const int wanted = (int)args[1].v_int64;
  Context context = NULL;
  int device = -1, result;
  if (driver.get_context(&context) == 0 && context && driver.get_device(&device) == 0 && device == wanted) return 0;
  if ((result = driver.device_of(&device, wanted))) return fail("there is no such device", result);
  if ((result = driver.retain_context(&context, device))) return fail("no context on the device", result);
  if ((result = driver.set_context(context))) return fail("the device's context cannot be used", result);
  return 0;
}

// Arguments: descriptor, element type, rank, address; of each dimension size, stride in bytes, box and step; then how
// elements are interleaved, swizzled, kept in L2 and filled. The first stride is that of an element, and implied.
static int encode_tensor_map(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* out) {
  if (!has_driver()) return fail("the CUDA driver, libcuda.so.1, cannot be loaded", 0);
  if (!driver.encode_tiled) return fail("the CUDA driver is too old for tensor maps: 12.0 or later is needed", 0);
  const int rank = (int)args[2].v_int64;
  uint64_t sizes[5], strides[5];
  uint32_t box[5], steps[5];
  if (rank < 1 || rank > 5) return fail("a tensor map has 1 to 5 dimensions", 0);
  for (int i = 0; i < rank; ++i) {
    sizes[i] = args[4 + i].v_int64;
    strides[i] = args[4 + rank + i].v_int64;
    box[i] = (uint32_t)args[4 + 2 * rank + i].v_int64;
    steps[i] = (uint32_t)args[4 + 3 * rank + i].v_int64;
  }
  const TVMFFIAny* rest = args + 4 + 4 * rank;
  int result = driver.encode_tiled(args[0].v_ptr, (int)args[1].v_int64, rank, args[3].v_ptr, sizes, strides + 1, box,
                                   steps, (int)rest[0].v_int64, (int)rest[1].v_int64, (int)rest[2].v_int64,
                                   (int)rest[3].v_int64);
  return result ? fail("a tensor map cannot be made", result) : 0;
}

static int load_kernel(Function* function, unsigned shared_bytes) {
  Module module;
  int result;
  if ((result = driver.load_module(&module, kda_cubin))) return fail("the binary cannot be loaded", result);
  if ((result = driver.get_function(function, module, kda_kernel.name)))
    return fail("the binary lacks the kernel", result);
  if (shared_bytes && (result = driver.set_attribute(*function, kMaxSharedBytes, (int)shared_bytes)))
    return fail("the device lacks shared memory for it", result);
  // A multiprocessor is not parted anew between shared memory and cache while blocks run there: leave the next its room
  if (strchr(kda_kernel.launch, 'n') && (result = driver.set_attribute(*function, kCarveout, 100)))
    return fail("the device refuses its share of shared memory", result);
  return 0;
}

static Function find_kernel(int device, unsigned shared_bytes) {
  Function function = __atomic_load_n(&functions[device], __ATOMIC_ACQUIRE);
  if (function) return function;
  pthread_mutex_lock(&loading);
  if (!(function = functions[device])) {
    if (load_kernel(&function, shared_bytes) == 0)
      __atomic_store_n(&functions[device], function, __ATOMIC_RELEASE);
    else
      function = NULL;
  }
  pthread_mutex_unlock(&loading);
  return function;
}

static int launch(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* out) {
  const int parameters = (int)strlen(kda_kernel.parameters);
  const int numbers = (int)strspn(kda_kernel.launch, "0123456");
  if (parameters > kParameters || count != parameters + numbers)
    return fail("the host code does not fit the binary", 0);
  if (!has_driver()) return fail("the CUDA driver, libcuda.so.1, cannot be loaded", 0);
  void* pointers[kParameters];
  union {
    int32_t i;
    float f;
  } small[kParameters];
  for (int i = 0; i < parameters; ++i) {
    pointers[i] = &small[i];
    switch (kda_kernel.parameters[i]) {
      case 'p': pointers[i] = (void*)&args[i].v_ptr; break;
      case 't': pointers[i] = args[i].v_ptr; break;
      case 'l': pointers[i] = (void*)&args[i].v_int64; break;
      case 'i': small[i].i = (int32_t)args[i].v_int64; break;
      case 'f': small[i].f = (float)args[i].v_float64; break;
    }
  }
  unsigned extent[7] = {1, 1, 1, 1, 1, 1, 0};
  for (int i = 0; i < numbers; ++i) extent[kda_kernel.launch[i] - '0'] = (unsigned)args[parameters + i].v_int64;
  int device, result;
  if ((result = driver.get_device(&device))) return fail("no device is current", result);
  if (device < 0 || device >= kDevices) return fail("there are more devices than it knows", 0);
  Function function = find_kernel(device, extent[6]);
  if (!function) return -1;
  struct Attribute early = {.id = kStartsEarly, .value.allowed = 1};
  const struct Launch how = {{extent[0], extent[1], extent[2]}, {extent[3], extent[4], extent[5]}, extent[6],
                             TVMFFIEnvGetStream(kDLCUDA, device), &early, strchr(kda_kernel.launch, 'e') != NULL};
  result = driver.launch(&how, function, pointers, NULL);
  return result ? fail("the kernel was not launched", result) : 0;
}

// The only function of TVM's runtime that generated host code calls; what it finds lives as long as the process.
__attribute__((visibility("hidden"))) int TVMBackendGetFuncFromEnv(void* self, const char* name, void** out) {
  TVMFFISafeCallType call = !strcmp(name, "__tvm_set_device")               ? set_device
                            : !strcmp(name, "__tvm_tensormap_create_tiled") ? encode_tensor_map
                            : !strcmp(name, kda_kernel.name)                ? launch
                                                                            : NULL;
  if (!call) return fail("the host code asks for a function that is not there", 0);
  return TVMFFIFunctionCreate(NULL, call, NULL, out);
}
