// SPDX-License-Identifier: Apache-2.0
// A shared library found at run time. It is never unloaded, because its own threads may still run its code. The owner
// of the file is not checked: the user chose it by settings, the loader's paths or Python's import folders.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace farandole {

class DynamicLibrary {
 public:
  // Returns the first of `names` that is loaded, else the first that loads. `error` receives the loader's errors.
  static std::optional<DynamicLibrary> try_open(const std::vector<std::string>& names,
                                                std::string* error = nullptr);
  // Like try_open(), but throws Error(kLibrary): "no `what`", the reason, and `remedy`.
  static DynamicLibrary open(const std::vector<std::string>& names, const std::string& what,
                             const std::string& remedy);

  // Returns the loaded libraries that define this symbol themselves.
  static std::vector<DynamicLibrary> that_define(const char* symbol);

  const std::string& name() const { return name_; }
  // Folder of the library that defines this symbol; empty: unknown.
  std::string folder_of(const char* symbol) const;

  template <class Function>
  Function* find(const char* symbol) const {  // nullptr if missing
    return reinterpret_cast<Function*>(find_address(symbol));
  }
  template <class Function>
  Function* require(const char* symbol) const {  // throws kLibrary
    return reinterpret_cast<Function*>(require_address(symbol));
  }
  // Fills an entry of a function table; throws kLibrary.
  template <class Function>
  void fill(Function*& row, const char* symbol) const {
    row = require<Function>(symbol);
  }
  template <class Function>
  void fill_if_there(Function*& row, const char* symbol) const {
    row = find<Function>(symbol);
  }

 private:
  DynamicLibrary(void* handle, std::string name) : handle_(handle), name_(std::move(name)) {}
  void* find_address(const char* symbol) const;
  void* require_address(const char* symbol) const;

  void* handle_;
  std::string name_;
};

}  // namespace farandole
