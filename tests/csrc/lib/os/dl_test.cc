// SPDX-License-Identifier: Apache-2.0
#include "lib/os/dl.h"

#include <dlfcn.h>

#include "check.h"

namespace farandole {

TEST(a_loaded_library_is_preferred_to_an_earlier_name) {
  const DynamicLibrary libc = *DynamicLibrary::try_open({"libfarandole-none.so", "libc.so.6"});
  CHECK_EQ(libc.name(), "libc.so.6");
  CHECK_EQ(libc.require<int(int)>("abs")(-7), 7);
  CHECK(libc.find<void()>("farandole_no_such_function") == nullptr);
}

TEST(a_missing_library_or_symbol_is_named) {
  std::string error;
  CHECK(!DynamicLibrary::try_open({"libfarandole-a.so", "libfarandole-b.so"}, &error));
  CHECK(error.find("libfarandole-a.so") != std::string::npos);
  CHECK(error.find("libfarandole-b.so") != std::string::npos);
  const DynamicLibrary libc = *DynamicLibrary::try_open({"libc.so.6"});
  CHECK_THROWS(libc.require<void()>("farandole_no_such_function"), ErrorCode::kLibrary);
}

TEST(a_library_stays_loaded_when_its_owner_is_gone) {
  const char* kName = "libanl.so.1";  // part of glibc, used by nobody here
  CHECK(dlopen(kName, RTLD_NOW | RTLD_NOLOAD) == nullptr);
  CHECK(DynamicLibrary::try_open({kName}).has_value());
  CHECK(dlopen(kName, RTLD_NOW | RTLD_NOLOAD) != nullptr);
}

}  // namespace farandole
