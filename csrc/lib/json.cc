// SPDX-License-Identifier: Apache-2.0
#include "lib/json.h"

#include <cstdio>
#include <cstdlib>

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
  char digits[40];
  const long long whole = std::llabs(ns) / 1000;
  std::snprintf(digits, sizeof digits, "%s%lld.%03lld", ns < 0 ? "-" : "", whole,
                static_cast<long long>(std::llabs(ns) % 1000));
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
