// SPDX-License-Identifier: Apache-2.0
// A library found at run time. It stays loaded: code of foreign threads may still run in it.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace farandole {

class DynamicLibrary {
 public:
  // The first of `names` that the process has loaded already, else the first that can be loaded.
  // `error`, if given, receives the loader's words for each name that failed.
  static std::optional<DynamicLibrary> try_open(const std::vector<std::string>& names,
                                                std::string* error = nullptr);
  static DynamicLibrary open(const std::vector<std::string>& names);  // throws kLibrary
  // The first of `names` that the process has loaded already; none is loaded.
  static std::optional<DynamicLibrary> find_loaded(const std::vector<std::string>& names);

  DynamicLibrary(DynamicLibrary&& other) noexcept;
  DynamicLibrary& operator=(DynamicLibrary&& other) noexcept;
  ~DynamicLibrary();

  const std::string& name() const { return name_; }
  // In which the loader found the library that has this symbol; empty: it does not know.
  std::string folder_of(const char* symbol) const;

  template <class Function>
  Function* find(const char* symbol) const {  // nullptr: the library has no such function
    return reinterpret_cast<Function*>(find_address(symbol));
  }
  template <class Function>
  Function* require(const char* symbol) const {  // throws kLibrary
    return reinterpret_cast<Function*>(require_address(symbol));
  }
  // Fills one row of a table of functions; throws kLibrary.
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
