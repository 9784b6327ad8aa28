// SPDX-License-Identifier: Apache-2.0
// Writes JSON, piece by piece. Whoever calls keeps objects and arrays balanced.
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
  // Nanoseconds as microseconds, to three places: the unit of traces.
  Json& microseconds(int64_t ns);
  Json& line();  // what follows begins a line

  Json& member(std::string_view name, std::string_view text) { return key(name).value(text); }
  Json& member(std::string_view name, std::integral auto number) { return key(name).value(number); }

  const std::string& text() const { return text_; }
  // The text so far is somewhere else now; goes on behind it.
  void forget() { text_.clear(); }

 private:
  Json& raw(std::string_view token);
  void separate();
  void quote(std::string_view text);
  std::string text_;
  bool comma_ = false;  // before whatever comes next
  bool line_ = false;
};

}  // namespace farandole
