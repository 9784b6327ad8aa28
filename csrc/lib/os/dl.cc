// SPDX-License-Identifier: Apache-2.0
#include "lib/os/dl.h"

#include <dlfcn.h>
#include <link.h>

#include <set>

#include "base/error.h"

namespace farandole {
namespace {

// RTLD_NODELETE, because a library's threads and exit handlers may still run when farandole no longer uses it.
constexpr int kFlags = RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE;

std::string last_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "unknown error";
}

}  // namespace

std::optional<DynamicLibrary> DynamicLibrary::try_open(const std::vector<std::string>& names,
                                                       std::string* error) {
  for (const std::string& name : names) {
    void* handle = dlopen(name.c_str(), kFlags | RTLD_NOLOAD);
    if (handle != nullptr) return DynamicLibrary(handle, name);
  }
  std::string failures;
  for (const std::string& name : names) {
    void* handle = dlopen(name.c_str(), kFlags);
    if (handle != nullptr) return DynamicLibrary(handle, name);
    failures += (failures.empty() ? "" : "; ") + last_error();
  }
  if (error != nullptr) *error = failures;
  return std::nullopt;
}

DynamicLibrary DynamicLibrary::open(const std::vector<std::string>& names, const std::string& what,
                                    const std::string& remedy) {
  std::string error;
  if (std::optional<DynamicLibrary> library = try_open(names, &error)) return *std::move(library);
  throw Error(ErrorCode::kLibrary, "cannot load " + what + ": " + error + "; " + remedy);
}

std::vector<DynamicLibrary> DynamicLibrary::that_define(const char* symbol) {
  // Collects the names first, because the loader holds its lock during the walk.
  std::vector<std::string> names;
  const auto note = [](dl_phdr_info* info, size_t, void* into) {
    static_cast<std::vector<std::string>*>(into)->push_back(info->dlpi_name);
    return 0;
  };
  dl_iterate_phdr(note, &names);
  std::vector<DynamicLibrary> found;
  std::set<const void*> seen;
  for (const std::string& name : names) {
    void* handle = dlopen(name.empty() ? nullptr : name.c_str(), kFlags | RTLD_NOLOAD);
    void* address =
        handle == nullptr ? nullptr : dlsym(handle, symbol);  // also searches dependencies
    Dl_info definer;
    if (address == nullptr || dladdr(address, &definer) == 0) continue;
    if (seen.insert(address).second) found.push_back(DynamicLibrary(handle, definer.dli_fname));
  }
  return found;
}

std::string DynamicLibrary::folder_of(const char* symbol) const {
  Dl_info found;
  if (dladdr(find_address(symbol), &found) == 0) return "";
  const std::string path = found.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

void* DynamicLibrary::find_address(const char* symbol) const { return dlsym(handle_, symbol); }

void* DynamicLibrary::require_address(const char* symbol) const {
  void* address = find_address(symbol);
  if (address != nullptr) return address;
  throw Error(ErrorCode::kLibrary, name_ + " has no function " + symbol + ": " + last_error());
}

}  // namespace farandole
