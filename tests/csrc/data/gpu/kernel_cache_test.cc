// SPDX-License-Identifier: Apache-2.0
// Compiled kernels in the user's cache: whatever lies there, the kernels that are loaded are right, and a process that
// cannot use the cache compiles.
#include "data/gpu/gpu_module.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "data/nccl/nccl_members.h"
#include "folder.h"
#include "kernels/gpu_source.h"
#include "lib/os/text_file.h"

using namespace farandole;
using namespace farandole::check;
namespace fs = std::filesystem;

namespace {

// An empty cache folder of this test's own, which is the user's meanwhile.
class Cache {
 public:
  Cache() { ::setenv("XDG_CACHE_HOME", own_.path().c_str(), 1); }
  ~Cache() { ::unsetenv("XDG_CACHE_HOME"); }
  fs::path folder() const { return own_.path(); }
  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    if (!fs::exists(folder() / "farandole")) return found;
    for (const auto& entry : fs::directory_iterator(folder() / "farandole")) {
      found.push_back(entry.path());
    }
    return found;
  }

 private:
  const Folder own_;
};

void load(const nvrtc::Api& nvrtc = *gpu_library().nvrtc) {
  const GpuModule module(GpuDevice::open(gpu_library().cuda, 0), nvrtc);
  CHECK(module.function(gpu::kMoveKernel) != nullptr);
}

// Whether loading the kernels compiles them; leaves the cache as it is.
bool compiles(const nvrtc::Api& nvrtc = *gpu_library().nvrtc) {
  gpu_library().fail("nvrtcCompileProgram", 0, 6);
  bool compiled = false;
  try {
    load(nvrtc);
  } catch (const Error& error) {
    CHECK_EQ(error.code(), ErrorCode::kLibrary);
    compiled = true;
  }
  gpu_library().heal();
  return compiled;
}

void overwrite(const fs::path& file, const std::string& text) {
  std::ofstream(file, std::ios::binary | std::ios::trunc) << text;
}

}  // namespace

TEST(the_second_process_compiles_nothing) {
  const Cache cache;
  CHECK(compiles());
  load();
  CHECK(!compiles());
  CHECK_EQ(cache.files().size(), size_t{1});
  CHECK_EQ(gpu_library().alive(), 0);
}

TEST(a_spoiled_file_is_compiled_anew) {
  const Cache cache;
  load();
  const fs::path file = cache.files().at(0);
  const std::string whole = read_text_file(file);
  std::string changed = whole;
  changed[whole.size() / 2] ^= 1;
  for (const std::string& spoiled :
       {std::string(), whole.substr(0, 1), whole.substr(0, whole.size() / 2),
        whole.substr(0, whole.size() - 1), whole + "x", changed, std::string(whole.size(), '\0'),
        std::string("\x7f"
                    "ELF")}) {
    overwrite(file, spoiled);
    CHECK(compiles());
    load();
    CHECK(!compiles());
    CHECK(read_text_file(file) == whole);
  }
}

TEST(a_file_that_others_may_write_is_not_loaded) {
  const Cache cache;
  load();
  const fs::path file = cache.files().at(0);
  CHECK_EQ(chmod(file.c_str(), 0666), 0);
  CHECK(compiles());
  load();  // in place of it, a file of this user's own
  CHECK(!compiles());
}

TEST(a_cache_that_can_not_be_used_costs_a_compilation) {
  const Cache cache;
  overwrite(cache.folder() / "farandole", "a file where the folder should be");
  load();
  CHECK(compiles());
  fs::remove(cache.folder() / "farandole");
  load();
  const fs::path file = cache.files().at(0);
  fs::remove(file);
  fs::create_directory(file);  // it can neither be read nor replaced
  load();
  CHECK(compiles());
  CHECK_EQ(cache.files().size(), size_t{1});  // nothing is left beside it
}

TEST(nothing_is_stored_without_a_home_folder) {
  const std::string home = std::getenv("HOME") ? std::getenv("HOME") : "";
  for (const char* folder : {"", "relative/folder"}) {
    ::setenv("XDG_CACHE_HOME", folder, 1);
    ::setenv("HOME", folder, 1);
    CHECK(KernelCache(*gpu_library().nvrtc, "source", 90).path().empty());
    load();
    CHECK(compiles());
  }
  ::unsetenv("HOME");
  ::unsetenv("XDG_CACHE_HOME");
  CHECK(KernelCache(*gpu_library().nvrtc, "source", 90).path().empty());
  ::setenv("HOME", "/home/of the user", 1);
  const std::string path = KernelCache(*gpu_library().nvrtc, "source", 90).path();
  CHECK(path.starts_with("/home/of the user/.cache/farandole/kernels-"));
  home.empty() ? ::unsetenv("HOME") : ::setenv("HOME", home.c_str(), 1);
}

TEST(another_compiler_source_or_architecture_has_an_image_of_its_own) {
  const Cache cache;
  const nvrtc::Api& nvrtc = *gpu_library().nvrtc;
  nvrtc::Api newer = nvrtc, elsewhere = nvrtc;
  newer.minor += 1;
  elsewhere.path += ".other";
  load();
  CHECK(compiles(newer));
  CHECK(compiles(elsewhere));
  const KernelCache one(nvrtc, "source", 90);
  const KernelCache others[] = {{nvrtc, "another source", 90},
                                {nvrtc, "source", 100},
                                {newer, "source", 90},
                                {elsewhere, "source", 90}};
  one.write("image");
  for (const KernelCache& other : others) {
    CHECK(other.path() != one.path());
    CHECK(other.read().empty());
    fs::copy_file(one.path(), other.path());  // as if two had one name
    CHECK(other.read().empty());
    other.write("another image");
  }
  CHECK_EQ(one.read(), "image");
}

// As processes of two containers may, which have one number and share a home, too.
TEST(many_write_and_read_at_once) {
  for (int turn = 0; turn < 20; ++turn) {
    const Cache cache;
    in_threads(6, [](int) {
      for (int i = 0; i < 5; ++i) load();
    });
    load();
    CHECK(!compiles());
    CHECK_EQ(cache.files().size(), size_t{1});
  }
  CHECK_EQ(gpu_library().alive(), 0);
}
