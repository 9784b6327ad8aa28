// SPDX-License-Identifier: Apache-2.0
// Messages as text, for whoever looks for the reason of a failed seed: the kind, and its fields in their order.
#include <cstdio>
#include <iterator>

#include "control/protocol/fields.h"
#include "control/simulator/simulator.h"

namespace farandole::simulation {
namespace {

constexpr const char* kReports[] = {"Ready",  "Refuse",      "Join",     "Done",      "Forgot",
                                    "Leave",  "StackReport", "Inquire",  "ReadyMany", "Lost",
                                    "UseGpu", "SetUp",       "Expedite", "Post"};
constexpr const char* kEntries[] = {"Define",        "Forget",  "Run",      "Result",  "Fail",
                                    "Joined",        "OpenSet", "CloseSet", "Abort",   "Stop",
                                    "CollectStacks", "Inform",  "SetUp",    "Matched", "Notice"};
static_assert(std::size(kReports) == std::variant_size_v<Report>);
static_assert(std::size(kEntries) == std::variant_size_v<Entry>);

template <class T>
std::string text_of_field(const T& x) {
  if constexpr (std::is_convertible_v<T, std::string>) {
    return "'" + x + "'";
  } else if constexpr (std::is_same_v<T, Signature>) {
    return name_of(x.op) + farandole::text_of(x.shape);
  } else if constexpr (std::is_enum_v<T> || std::is_same_v<T, std::byte>) {
    return std::to_string(static_cast<int>(x));
  } else if constexpr (std::is_arithmetic_v<T>) {
    return std::to_string(x);
  } else if constexpr (std::is_same_v<T, IdRuns>) {
    std::string text;
    x.for_each([&](uint32_t id) { text += " " + std::to_string(id); });
    return "ids" + text;
  } else {
    std::string text;
    const auto add = [&](const auto& y) { text += (text.empty() ? "" : ", ") + text_of_field(y); };
    if constexpr (std::ranges::range<T>) {
      std::ranges::for_each(x, add);
      return "[" + text + "]";
    } else {
      std::apply([&](const auto&... fields) { (add(fields), ...); }, check::fields_of(x));
      return "(" + text + ")";
    }
  }
}

template <class Message>
std::string text_of_message(const char* kind, const Message& message) {
  return kind + std::visit([](const auto& x) { return text_of_field(x); }, message);
}

}  // namespace

std::string text_of(const Report& report) {
  return text_of_message(kReports[report.index()], report);
}
std::string text_of(const Entry& entry) { return text_of_message(kEntries[entry.index()], entry); }

void Simulator::print(const std::string& line) const {
  std::fprintf(stderr, "%ld %s\n", static_cast<long>(now_), line.c_str());
}

}  // namespace farandole::simulation
