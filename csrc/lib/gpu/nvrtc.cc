// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/nvrtc.h"

#include "base/error.h"
#include "lib/os/dl.h"

namespace farandole::nvrtc {
namespace {

constexpr int kOldestCapability = 80;

// One compilation. The destructor frees the memory that NVRTC allocated.
class Compilation {
 public:
  Compilation(const Api& api, const std::string& source) : api_(api) {
    check(api.create(&program_, source.c_str(), "farandole.cu", 0, nullptr, nullptr), "create");
  }
  ~Compilation() { api_.destroy(&program_); }
  Compilation(const Compilation&) = delete;
  Compilation& operator=(const Compilation&) = delete;

  bool run(const std::string& architecture) {
    const std::string option = "--gpu-architecture=" + architecture;
    const char* options[] = {option.c_str(), "--std=c++17", "--fmad=false"};
    result_ = api_.compile(program_, 3, options);
    return result_ == 0;
  }
  std::string cubin() const { return text(api_.cubin_bytes, api_.cubin); }
  std::string ptx() const { return text(api_.ptx_bytes, api_.ptx); }
  [[noreturn]] void fail() const {
    throw Error(ErrorCode::kLibrary, std::string("NVRTC can't compile the GPU kernels: ") +
                                         api_.error_text(result_) + "\n" +
                                         text(api_.log_bytes, api_.log));
  }

 private:
  void check(Result result, const char* what) const {
    if (result == 0) return;
    throw Error(ErrorCode::kLibrary, std::string("NVRTC ") + what + ": " + api_.error_text(result));
  }
  std::string text(Result (*bytes_of)(Program, size_t*), Result (*get)(Program, char*)) const {
    size_t bytes = 0;
    check(bytes_of(program_, &bytes), "size");
    std::string out(bytes, '\0');
    check(get(program_, out.data()), "get");
    return out;
  }

  const Api& api_;
  Program program_ = nullptr;
  Result result_ = 0;
};

// Loads NVRTC's builtins, a library that NVRTC opens by its name. The NVRTC in CUDA 13.0's wheel does not search its
// own folder, so the builtins must be loaded first. If this fails, NVRTC later reports what is missing.
void load_builtins(const DynamicLibrary& library, const Api& api) {
  const std::string name =
      "libnvrtc-builtins.so." + std::to_string(api.major) + "." + std::to_string(api.minor);
  DynamicLibrary::try_open({name, library.folder_of("nvrtcVersion") + "/" + name});
}

}  // namespace

std::shared_ptr<const Api> open(const std::vector<std::string>& paths) {
  const auto library = DynamicLibrary::open(
      paths, "NVRTC", "run: pip install nvidia-cuda-nvrtc (or nvidia-cuda-nvrtc-cu12)");
  auto api = std::make_shared<Api>();
  api->path = library.name();
  library.fill(api->get_version, "nvrtcVersion");
  library.fill(api->error_text, "nvrtcGetErrorString");
  library.fill(api->create, "nvrtcCreateProgram");
  library.fill(api->destroy, "nvrtcDestroyProgram");
  library.fill(api->compile, "nvrtcCompileProgram");
  library.fill(api->cubin_bytes, "nvrtcGetCUBINSize");
  library.fill(api->cubin, "nvrtcGetCUBIN");
  library.fill(api->ptx_bytes, "nvrtcGetPTXSize");
  library.fill(api->ptx, "nvrtcGetPTX");
  library.fill(api->log_bytes, "nvrtcGetProgramLogSize");
  library.fill(api->log, "nvrtcGetProgramLog");
  api->get_version(&api->major, &api->minor);
  load_builtins(library, *api);
  return api;
}

std::string compile(const Api& api, const std::string& source, int capability) {
  Compilation exact(api, source);
  if (exact.run("sm_" + std::to_string(capability))) return exact.cubin();
  Compilation general(api, source);
  if (general.run("compute_" + std::to_string(kOldestCapability))) return general.ptx();
  exact.fail();
}

}  // namespace farandole::nvrtc
