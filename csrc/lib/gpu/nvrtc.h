// SPDX-License-Identifier: Apache-2.0
// Compiles CUDA sources with NVRTC, NVIDIA's run-time compiler.
#pragma once

#include <memory>
#include <string>
#include <vector>

struct _nvrtcProgram;

namespace farandole::nvrtc {

using Result = int;
using Program = _nvrtcProgram*;

struct Api {
  std::string path;
  int major = 0, minor = 0;

  Result (*get_version)(int* major, int* minor);
  const char* (*error_text)(Result result);
  Result (*create)(Program* program, const char* source, const char* name, int headers,
                   const char* const* header_texts, const char* const* header_names);
  Result (*destroy)(Program* program);
  Result (*compile)(Program program, int options, const char* const* option);
  Result (*cubin_bytes)(Program program, size_t* bytes);
  Result (*cubin)(Program program, char* out);
  Result (*ptx_bytes)(Program program, size_t* bytes);
  Result (*ptx)(Program program, char* out);
  Result (*log_bytes)(Program program, size_t* bytes);
  Result (*log)(Program program, char* out);
};

// Loads the library. On failure, throws Error(kLibrary) with a remedy.
std::shared_ptr<const Api> open(const std::vector<std::string>& paths);

// Compiles the source to a cubin for this compute capability (90 means sm_90). If this NVRTC does not know the
// capability, returns PTX, which the driver then compiles. On failure, throws Error(kLibrary) with the compiler's text.
std::string compile(const Api& api, const std::string& source, int capability);

}  // namespace farandole::nvrtc
