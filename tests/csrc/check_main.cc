// SPDX-License-Identifier: Apache-2.0
// main() of every C++ test: `x_test [--list] [--option value ...] [part of a test's name ...]`; exit code 0 passed,
// 1 failed, 2 nothing matched. `--stop first` ends it with the first test that fails.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "check.h"

namespace farandole::check {
namespace {

struct Test {
  const char* name;
  void (*body)();
};

std::vector<Test>& registry() {
  static auto* tests = new std::vector<Test>;  // leaked: no order of destruction to think about
  return *tests;
}

std::map<std::string, std::string>& options() {
  static auto* options = new std::map<std::string, std::string>;
  return *options;
}

void print(const std::string& line) {
  const std::string text = line + "\n";
  if (::write(STDERR_FILENO, text.data(), text.size()) < 0) std::abort();
}

// True when `body` returned; prints what else happened.
bool returns(const std::function<void()>& body) {
  try {
    body();
    return true;
  } catch (const Failed&) {
  } catch (const Skipped&) {
    throw;
  } catch (const std::exception& error) {
    print(std::string("uncaught exception: ") + error.what());
  }
  return false;
}

[[noreturn]] void run_child(const std::function<void()>& body) {
  bool passed = false;
  try {
    passed = returns(body);
  } catch (const Skipped&) {
    print("skip() belongs into the parent");
  }
  ::_exit(passed ? 0 : 1);
}

std::string text_of_status(int status) {
  if (WIFSIGNALED(status)) return std::string("died of ") + strsignal(WTERMSIG(status));
  return "ended with exit code " + std::to_string(WEXITSTATUS(status));
}

// Takes the options out; what is left are parts of names.
std::vector<std::string> parse(int argc, char** argv) {
  std::vector<std::string> parts;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], "--", 2) != 0) {
      parts.push_back(argv[i]);
    } else if (i + 1 < argc) {
      options()[argv[i] + 2] = argv[i + 1];
      ++i;
    }
  }
  return parts;
}

bool matches(const char* name, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (std::strstr(name, part.c_str()) != nullptr) return true;
  }
  return parts.empty();
}

enum class Outcome { kPassed, kFailed, kSkipped };

Outcome run(const Test& test) {
  print(std::string("run  ") + test.name);
  const auto start = std::chrono::steady_clock::now();
  Outcome outcome = Outcome::kSkipped;
  try {
    outcome = returns(test.body) ? Outcome::kPassed : Outcome::kFailed;
  } catch (const Skipped& skipped) {
    print(std::string("skip ") + test.name + ": " + skipped.what());
    return outcome;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  char line[32];
  std::snprintf(line, sizeof line, " %.3f s", seconds.count());
  print((outcome == Outcome::kPassed ? "ok   " : "FAIL ") + std::string(test.name) + line);
  return outcome;
}

int run_all(const std::vector<std::string>& parts) {
  int counts[3] = {0, 0, 0};
  for (const Test& test : registry()) {
    if (matches(test.name, parts)) ++counts[static_cast<int>(run(test))];
    if (counts[1] > 0 && option("stop") == "first") break;
  }
  const auto [passed, failed, skipped] = counts;
  print(std::to_string(passed) + " passed, " + std::to_string(failed) + " failed, " +
        std::to_string(skipped) + " skipped");
  if (passed + failed + skipped == 0) return 2;
  return failed == 0 ? 0 : 1;
}

}  // namespace

Registration::Registration(const char* name, void (*body)()) { registry().push_back({name, body}); }

void fail(const std::string& text, Location where) {
  const std::string line =
      std::string(where.file_name()) + ":" + std::to_string(where.line()) + ": " + text;
  print(line);
  throw Failed(line);
}

std::string option(const std::string& name) {
  const auto found = options().find(name);
  return found == options().end() ? std::string() : found->second;
}

void skip(const std::string& reason) { throw Skipped(reason); }

pid_t fork_bound(Location where) {
  int bound[2];
  if (::pipe(bound) != 0) fail("pipe failed", where);
  const pid_t parent = ::getpid(), child = ::fork();
  if (child < 0) fail("fork failed", where);
  char done = 0;
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent || ::write(bound[1], &done, 1) != 1) ::_exit(1);
  } else if (::read(bound[0], &done, 1) != 1) {  // else it might be stopped before it is bound
    fail("a child is not bound to its parent", where);
  }
  ::close(bound[0]), ::close(bound[1]);
  return child;
}

void run_in_fork(const std::function<void()>& body, Location where) {
  run_in_forks(1, [&](int) { body(); }, where);
}

void run_in_forks(int ranks, const std::function<void(int)>& body, Location where) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork_bound(where);
    if (pid == 0) run_child([&] { body(rank); });
    children.push_back(pid);
  }
  std::string failures;
  for (int rank = 0; rank < ranks; ++rank) {
    int status = 0;
    while (::waitpid(children[rank], &status, 0) < 0 && errno == EINTR) {
    }
    if (status != 0) {
      failures += " child " + std::to_string(rank) + " " + text_of_status(status) + ";";
    }
  }
  if (!failures.empty()) fail("forked:" + failures, where);
}

}  // namespace farandole::check

int main(int argc, char** argv) {
  using namespace farandole::check;
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    for (const Test& test : registry()) std::printf("%s\n", test.name);
    return 0;
  }
  return run_all(parse(argc, argv));
}
