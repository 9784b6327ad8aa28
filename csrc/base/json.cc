// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <cstdio>

namespace farandole {

void Json::separate() {
  if (comma_) text_ += ',';
  if (line_) text_ += '\n';
  comma_ = line_ = false;
}

Json& Json::raw(std::string_view token) {
  separate();
  text_ += token;
  comma_ = true;
  return *this;
}

Json& Json::open(char bracket) {
  separate();
  text_ += bracket;
  return *this;
}

Json& Json::close(char bracket) {
  if (line_) text_ += '\n';
  text_ += bracket;
  comma_ = true;
  line_ = false;
  return *this;
}

Json& Json::key(std::string_view name) {
  separate();
  quote(name);
  text_ += ':';
  return *this;
}

Json& Json::value(std::string_view text) {
  separate();
  quote(text);
  comma_ = true;
  return *this;
}

Json& Json::microseconds(int64_t ns) {
  const int64_t size = std::llabs(ns);
  std::string digits = (ns < 0 ? "-" : "") + std::to_string(size / 1000) + ".000";
  int64_t rest = size % 1000;
  for (size_t i = digits.size(); rest > 0; rest /= 10) {
    digits[--i] = static_cast<char>('0' + rest % 10);
  }
  return raw(digits);
}

Json& Json::line() {
  line_ = true;
  return *this;
}

void Json::quote(std::string_view text) {
  text_ += '"';
  for (char c : text) {
    if (c == '"' || c == '\\') text_ += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) {
      text_ += c;
      continue;
    }
    char escaped[8];
    std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
    text_ += escaped;
  }
  text_ += '"';
}

}  // namespace farandole
