// What the host code that TileLang 0.1.15 generates asks its runtime for, on the CUDA driver alone: with this a kernel's
// binary needs tvm-ffi and the driver, and neither TileLang nor a CUDA toolkit. It is linked into every binary of a
// bundle beside the generated host code, which does the rest: checks, tensor maps' sizes, grids.
//
// kda_kernel, generated for each kernel, says how its device function is called.

#include <dlfcn.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <type_traits>

extern "C" {
// The device function's name; a letter a parameter (p pointer, t tensor map, i int32, l int64, f float); and, for each
// number that follows them, where it goes: 0 to 2 grid, 3 to 5 block, 6 bytes of dynamic shared memory.
struct KdaKernel {
  const char* name;
  const char* parameters;
  const char* launch;
};
extern const KdaKernel kda_kernel;
extern const unsigned char kda_cubin[];
}

namespace {

constexpr int kDevices = 64, kParameters = 128;

// Of the driver's interface (CUDA 12) as much as is called: no toolkit's headers are needed.
struct Driver {
  using Context = void*;
  using Function = void*;
  using Module = void*;
  int (*get_error_string)(int, const char**);
  int (*get_context)(Context*);
  int (*get_device)(int*);
  int (*device_of)(int*, int);
  int (*retain_context)(Context*, int);
  int (*set_context)(Context);
  int (*load_module)(Module*, const void*);
  int (*get_function)(Function*, Module, const char*);
  int (*set_attribute)(Function, int, int);
  int (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*encode_tiled)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*,
                      int, int, int, int);
  bool found;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    found = library != nullptr;
    auto find = [&](auto& function, const char* name, bool needed = true) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(library ? dlsym(library, name) : nullptr);
      found = found && (function || !needed);
    };
    find(get_error_string, "cuGetErrorString");
    find(get_context, "cuCtxGetCurrent");
    find(get_device, "cuCtxGetDevice");
    find(device_of, "cuDeviceGet");
    find(retain_context, "cuDevicePrimaryCtxRetain");
    find(set_context, "cuCtxSetCurrent");
    find(load_module, "cuModuleLoadData");
    find(get_function, "cuModuleGetFunction");
    find(set_attribute, "cuFuncSetAttribute");
    find(launch, "cuLaunchKernel");
    find(encode_tiled, "cuTensorMapEncodeTiled", false);  // not in a driver before CUDA 12.0
  }
};

constexpr int kMaxSharedBytes = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

const Driver& driver() {
  static const Driver found;
  return found;
}

int fail(const char* what, int result = 0) {
  const char* why = nullptr;
  if (result) driver().get_error_string(result, &why);
  char text[512];
  std::snprintf(text, sizeof text, "%s: %s%s%s", kda_kernel.name, what, why ? ": " : "", why ? why : "");
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", text);
  return -1;
}

// Makes the primary context of a device current, unless one of that device is. PyTorch has done so as a rule.
int set_device(void*, const TVMFFIAny* args, int32_t, TVMFFIAny*) {
  const Driver& d = driver();
  if (!d.found) return fail("the CUDA driver, libcuda.so.1, cannot be loaded");
  int wanted = static_cast<int>(args[1].v_int64);
  Driver::Context context = nullptr;
  int device = -1;
  if (d.get_context(&context) == 0 && context && d.get_device(&device) == 0 && device == wanted)
    return 0;
  if (int result = d.device_of(&device, wanted)) return fail("there is no such device", result);
  if (int result = d.retain_context(&context, device)) return fail("no context on the device", result);
  if (int result = d.set_context(context)) return fail("the device's context cannot be used", result);
  return 0;
}

// Arguments: descriptor, element type, rank, address; of each dimension size, stride in bytes, box and step; then how
// elements are interleaved, swizzled, kept in L2 and filled. The first stride is that of an element, and implied.
int encode_tensor_map(void*, const TVMFFIAny* args, int32_t, TVMFFIAny*) {
  const Driver& d = driver();
  if (!d.encode_tiled) return fail("the CUDA driver is too old for tensor maps: 12.0 or later is needed");
  auto number = [&](int i) { return static_cast<int>(args[i].v_int64); };
  const int rank = static_cast<int>(number(2));
  uint64_t sizes[5], strides[5];
  uint32_t box[5], steps[5];
  if (rank < 1 || rank > 5) return fail("a tensor map has 1 to 5 dimensions");
  for (int i = 0; i < rank; ++i) {
    sizes[i] = args[4 + i].v_int64;
    strides[i] = args[4 + rank + i].v_int64;
    box[i] = number(4 + 2 * rank + i);
    steps[i] = number(4 + 3 * rank + i);
  }
  const int rest = 4 + 4 * rank;
  int result = d.encode_tiled(
      args[0].v_ptr, number(1), rank, args[3].v_ptr, sizes, strides + 1, box, steps, number(rest), number(rest + 1),
      number(rest + 2), number(rest + 3));
  return result ? fail("a tensor map cannot be made", result) : 0;
}

std::mutex loading;
std::atomic<Driver::Function> functions[kDevices];

Driver::Function load(int device, unsigned shared_bytes) {
  const Driver& d = driver();
  std::lock_guard<std::mutex> guard(loading);
  if (Driver::Function ready = functions[device].load()) return ready;
  Driver::Module module;
  Driver::Function function;
  if (int result = d.load_module(&module, kda_cubin)) return fail("the binary cannot be loaded", result), nullptr;
  if (int result = d.get_function(&function, module, kda_kernel.name))
    return fail("the binary lacks the kernel", result), nullptr;
  if (shared_bytes) {
    int result = d.set_attribute(function, kMaxSharedBytes, shared_bytes);
    if (result) return fail("the device lacks shared memory for it", result), nullptr;
  }
  functions[device].store(function);
  return function;
}

int launch(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny*) {
  const Driver& d = driver();
  const int parameters = static_cast<int>(std::strlen(kda_kernel.parameters));
  const int numbers = static_cast<int>(std::strlen(kda_kernel.launch));
  if (parameters > kParameters || count != parameters + numbers) return fail("the host code does not fit the binary");
  void* pointers[kParameters];
  union {
    int32_t i;
    float f;
  } small[kParameters];
  for (int i = 0; i < parameters; ++i) {
    pointers[i] = &small[i];
    switch (kda_kernel.parameters[i]) {
      case 'p': pointers[i] = const_cast<void**>(&args[i].v_ptr); break;
      case 't': pointers[i] = args[i].v_ptr; break;
      case 'l': pointers[i] = const_cast<int64_t*>(&args[i].v_int64); break;
      case 'i': small[i].i = static_cast<int32_t>(args[i].v_int64); break;
      case 'f': small[i].f = static_cast<float>(args[i].v_float64); break;
    }
  }
  unsigned extent[7] = {1, 1, 1, 1, 1, 1, 0};
  for (int i = 0; i < numbers; ++i)
    extent[kda_kernel.launch[i] - '0'] = static_cast<unsigned>(args[parameters + i].v_int64);
  int device;
  if (int result = d.get_device(&device)) return fail("no device is current", result);
  if (device < 0 || device >= kDevices) return fail("there are more devices than it knows");
  Driver::Function function = functions[device].load(std::memory_order_acquire);
  if (!function && !(function = load(device, extent[6]))) return -1;
  auto stream = TVMFFIEnvGetStream(kDLCUDA, device);
  int result = d.launch(function, extent[0], extent[1], extent[2], extent[3], extent[4], extent[5], extent[6],
                             stream, pointers, nullptr);
  return result ? fail("the kernel was not launched", result) : 0;
}

}  // namespace

// The only function of TVM's runtime that generated host code calls; what it finds lives as long as the process.
extern "C" __attribute__((visibility("hidden"))) int TVMBackendGetFuncFromEnv(void*, const char* name, void** out) {
  TVMFFISafeCallType call = !std::strcmp(name, "__tvm_set_device")               ? set_device
                            : !std::strcmp(name, "__tvm_tensormap_create_tiled") ? encode_tensor_map
                            : !std::strcmp(name, kda_kernel.name)                ? launch
                                                                                 : nullptr;
  if (!call) return fail("the host code asks for a function that is not there");
  return TVMFFIFunctionCreate(nullptr, call, nullptr, out);
}
