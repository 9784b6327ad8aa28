// SPDX-License-Identifier: Apache-2.0
// A shared library that is found at run time. It is never unloaded, because its threads may still run. farandole does
// not check who owns the library's file: the user chose it by a setting, the loader's paths or Python's import folders.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace farandole {

class DynamicLibrary {
 public:
  // Returns the first library of `names` that is already loaded, otherwise the first that can be loaded. If `error` is
  // given, stores the loader's errors there.
  static std::optional<DynamicLibrary> try_open(const std::vector<std::string>& names,
                                                std::string* error = nullptr);
  // Like try_open(), but on failure throws Error(kLibrary) with "cannot load `what`", the reason and `remedy`.
  static DynamicLibrary open(const std::vector<std::string>& names, const std::string& what,
                             const std::string& remedy);

  static std::vector<DynamicLibrary> that_define(const char* symbol);

  const std::string& name() const { return name_; }
  // Returns the folder of the library that defines `symbol`, or "" if it is unknown.
  std::string folder_of(const char* symbol) const;

  template <class Function>
  Function* find(const char* symbol) const {  // nullptr if the symbol is missing
    return reinterpret_cast<Function*>(find_address(symbol));
  }
  template <class Function>
  Function* require(const char* symbol) const {  // throws Error(kLibrary) if the symbol is missing
    return reinterpret_cast<Function*>(require_address(symbol));
  }
  // Fills an entry of a function table. Throws Error(kLibrary) if the symbol is missing.
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
