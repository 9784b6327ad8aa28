// SPDX-License-Identifier: Apache-2.0
// A JSON writer for traces and log lines. The caller must close each bracket that it opens.
#pragma once

#include <concepts>
#include <string>
#include <string_view>

namespace farandole {

class Json {
 public:
  Json& open(char bracket);   // '{' or '['
  Json& close(char bracket);  // '}' or ']'
  Json& key(std::string_view name);
  Json& value(std::string_view text);
  Json& value(std::integral auto number) { return raw(std::to_string(number)); }
  // Writes nanoseconds as microseconds with three decimals, the unit of trace files.
  Json& microseconds(int64_t ns);
  Json& line();  // starts a new line before the next value or bracket

  Json& member(std::string_view name, std::string_view text) { return key(name).value(text); }
  Json& member(std::string_view name, std::integral auto number) { return key(name).value(number); }

  const std::string& text() const { return text_; }
  // Call this after writing text() to a file. Empties text(), but continues the same document.
  void forget() { text_.clear(); }

 private:
  Json& raw(std::string_view token);
  void separate();
  void quote(std::string_view text);
  std::string text_;
  bool comma_ = false;  // a comma is due before the next value
  bool line_ = false;
};

}  // namespace farandole
