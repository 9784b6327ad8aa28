// SPDX-License-Identifier: Apache-2.0
// NVRTC needs no GPU: the kernel source must compile for every architecture that we support.
#include <cstdlib>

#include "check.h"
#include "kernels/gpu_source.h"
#include "lib/gpu/nvrtc.h"

using namespace farandole;
using namespace farandole::check;

namespace {

std::shared_ptr<const nvrtc::Api> compiler() {
  const char* path = std::getenv("FARANDOLE_TEST_NVRTC");
  if (!path) skip("needs NVRTC: pip install nvidia-cuda-nvrtc");
  return nvrtc::open({path});
}

}  // namespace

TEST(the_kernels_compile_for_every_architecture) {
  const auto api = compiler();
  for (int capability : {80, 90, 100}) {
    const std::string image = nvrtc::compile(*api, gpu::kernel_source(), capability);
    CHECK_EQ(image.substr(1, 3), "ELF");
    CHECK(image.find(gpu::kMoveKernel) != std::string::npos);
  }
}

TEST(an_unknown_architecture_gets_ptx) {
  const std::string image = nvrtc::compile(*compiler(), gpu::kernel_source(), 990);
  CHECK(image.find(".target sm_80") != std::string::npos);
}

TEST(an_error_shows_the_compilers_words) {
  const auto api = compiler();
  const char* const source = "extern \"C\" __global__ void broken() { undeclared(); }";
  const std::string text = CHECK_THROWS(nvrtc::compile(*api, source, 80), ErrorCode::kLibrary);
  CHECK(text.find("undeclared") != std::string::npos);
}
