// SPDX-License-Identifier: Apache-2.0
// A tiny test registry: TEST(name) { CHECK(..); CHECK_EQ(a, b); text = CHECK_THROWS(expr, code); }
// A failed check prints itself at once, then throws: in a thread it ends the program, in run_in_fork the
// child, so a rank that failed never goes on to wait for the others.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <concepts>
#include <functional>
#include <limits>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"

namespace farandole::check {

using Location = std::source_location;

struct Failed : std::runtime_error {  // already printed
  using std::runtime_error::runtime_error;
};
struct Skipped : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Registration {
  Registration(const char* name, void (*body)());
};

// Replaces each number of ten or more digits, such as a time in nanoseconds, with N.
inline std::string without_clocks(std::string_view text) {
  constexpr size_t kShortest = 10;
  std::string kept;
  while (!text.empty()) {
    const size_t digits = std::min(text.find_first_not_of("0123456789"), text.size());
    if (digits >= kShortest) {
      kept += 'N';
    } else {
      kept += text.substr(0, digits);
    }
    text.remove_prefix(digits);
    const size_t others = std::min(text.find_first_of("0123456789"), text.size());
    kept += text.substr(0, others);
    text.remove_prefix(others);
  }
  return kept;
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Prints "file:line: text" to stderr and throws Failed.
[[noreturn]] void fail(const std::string& text, Location where = Location::current());
// Ends the test; printed and counted as skipped.
[[noreturn]] void skip(const std::string& reason);
// The value after "--name" on the command line; empty: not given.
std::string option(const std::string& name);
// fork(), with a child that dies with the calling thread, however that ends: a stopped one would else stay for ever.
pid_t fork_bound(Location where = Location::current());
// Runs `body` in a forked child that leaves by _exit; a failed check, an exception or a signal there fails the caller.
void run_in_fork(const std::function<void()>& body, Location where = Location::current());
// Forks `ranks` children running body(rank) at the same time; all are reaped, every failure is reported.
void run_in_forks(int ranks, const std::function<void(int)>& body,
                  Location where = Location::current());

// Runs body(number) in so many threads at once, until all have returned.
template <class Body>
void in_threads(int count, Body&& body) {
  std::vector<std::thread> threads;
  for (int number = 0; number < count; ++number)
    threads.emplace_back([&, number] { body(number); });
  for (std::thread& thread : threads) thread.join();
}

template <class T>
std::string text_of(const T& value) {
  std::ostringstream out;
  if constexpr (std::is_same_v<T, bool>) {
    out << (value ? "true" : "false");
  } else if constexpr (std::is_enum_v<T>) {
    out << "enum " << +static_cast<std::underlying_type_t<T>>(value);
  } else if constexpr (std::integral<T>) {
    out << +value;
  } else if constexpr (std::floating_point<T>) {
    out.precision(std::numeric_limits<T>::max_digits10);
    out << value;
  } else if constexpr (requires { out << value; }) {
    out << value;
  } else {
    out << "(" << sizeof(T) << "-byte value)";
  }
  return out.str();
}

template <class T>
concept PlainInteger = std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char>;

template <class A, class B>
bool equals(const A& a, const B& b) {
  if constexpr (PlainInteger<A> && PlainInteger<B>) {
    return std::cmp_equal(a, b);
  } else {
    return static_cast<bool>(a == b);
  }
}

inline void that(bool holds, const char* text, Location where = Location::current()) {
  if (!holds) fail(std::string("CHECK(") + text + ") is false", where);
}

template <class A, class B>
void equal(const A& a, const B& b, const char* text_a, const char* text_b,
           Location where = Location::current()) {
  if (equals(a, b)) return;
  fail(std::string("CHECK_EQ(") + text_a + ", " + text_b + "): " + text_of(a) + " != " + text_of(b),
       where);
}

// Returns the error's text.
template <class Function>
std::string throws(Function&& function, ErrorCode code, const char* text,
                   Location where = Location::current()) {
  std::string seen = "nothing was thrown";
  try {
    function();
  } catch (const Error& error) {
    if (error.code() == code) return error.what();
    seen = "code " + text_of(error.code()) + " was thrown: " + error.what();
  } catch (const Failed&) {
    throw;
  } catch (const std::exception& error) {
    seen = std::string("no farandole::Error: ") + error.what();
  }
  fail(std::string("CHECK_THROWS(") + text + ") expected code " + text_of(code) + ", but " + seen,
       where);
}

}  // namespace farandole::check

// The macros only capture text; what they do is in the functions above.
#define TEST(name)                                                                     \
  static void name##_test_body();                                                      \
  static const ::farandole::check::Registration name##_test(#name, &name##_test_body); \
  static void name##_test_body()
#define CHECK(...) ::farandole::check::that(static_cast<bool>(__VA_ARGS__), #__VA_ARGS__)
#define CHECK_EQ(a, b) ::farandole::check::equal((a), (b), #a, #b)
#define CHECK_THROWS(expression, code) \
  ::farandole::check::throws([&] { static_cast<void>(expression); }, (code), #expression)
