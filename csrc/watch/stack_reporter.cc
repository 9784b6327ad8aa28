// SPDX-License-Identifier: Apache-2.0
#include "watch/stack_reporter.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "base/logging.h"
#include "lib/os/text_file.h"
#include "lib/os/thread.h"

namespace farandole {
namespace {

constexpr size_t kMaxText = 4000;     // maximum size of a report, in bytes
constexpr size_t kMaxStacks = 65536;  // bytes to read; the default capacity of a pipe
constexpr size_t kMaxThreads = 8;     // number of threads whose states are reported
// Wait for Python's thread. If it does not answer by then, it probably can't: native code holds the GIL.
constexpr std::chrono::milliseconds kAnswer{300};
// Longest wait for the first line. The main thread may be in a system call that delays the signal.
constexpr std::chrono::milliseconds kFirstLine{500};
// Longest wait for a further line. faulthandler does not mark the end of its output, so a longer pause counts as the
// end.
constexpr std::chrono::milliseconds kNextLine{100};

void do_nothing(int) {}

// True also for 0, which is no signal.
bool has_handler(int signal, void (*handler)(int)) {
  struct sigaction action{};
  return sigaction(signal, nullptr, &action) != 0 ||
         (!(action.sa_flags & SA_SIGINFO) && action.sa_handler == handler);
}

// Waits at most `patience` for bytes, or for one message of a socket. Returns "" if none arrive.
std::string read_within(int fd, std::chrono::milliseconds patience) {
  const Deadline deadline = Deadline::in(patience);
  pollfd event{fd, POLLIN, 0};
  while (poll(&event, 1, deadline.poll_ms()) < 0 && !deadline.expired()) {
  }
  std::string text((event.revents & POLLIN) ? kMaxStacks : 0, '\0');
  const ssize_t got = text.empty() ? 0 : read(fd, text.data(), text.size());
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return text;
}

// Empties a pipe or socket of what came too late for an earlier report.
void drain(int fd) {
  while (!read_within(fd, std::chrono::milliseconds{0}).empty()) {
  }
}

// Lets the main thread's signal handler write the main thread's stack.
std::string stack_of_main_thread(const StackSource& source) {
  if (has_handler(source.signal, SIG_DFL)) return {};
  if (has_handler(source.signal, do_nothing)) return {};  // Python is exiting
  drain(source.pipe);
  const pid_t pid = getpid();
  if (syscall(SYS_tgkill, pid, pid, source.signal) != 0) return {};
  std::string text = read_within(source.pipe, kFirstLine);
  while (!text.empty() && text.size() < kMaxStacks) {
    const std::string more = read_within(source.pipe, kNextLine);
    if (more.empty()) break;
    text += more;
  }
  if (text.starts_with("Stack (")) text.replace(0, std::strlen("Stack"), "Main thread");
  return text;
}

// Asks Python's thread for the stacks of all threads. Asks the main thread if that thread does not answer.
StackReporter::Stacks python_stacks(const StackSource& source) {
  if (source.socket < 0) return {};
  drain(source.socket);
  const bool asked = send(source.socket, "?", 1, MSG_DONTWAIT | MSG_NOSIGNAL) == 1;
  std::string answer = asked ? read_within(source.socket, kAnswer) : "", main_only;
  if (answer.empty()) {
    main_only = stack_of_main_thread(source);
    answer = read_within(source.socket, std::chrono::milliseconds{0});  // a busy machine delays it
  }
  if (answer.empty()) return {std::move(main_only), false};
  return {answer.substr(1), answer[0] == '1'};
}

bool is_of_a_library(std::string_view frame) {
  return frame.find("/site-packages/") != std::string::npos ||
         frame.find("/dist-packages/") != std::string::npos ||
         frame.find("/lib/python3") != std::string::npos;
}

// Appends the enclosing loops to each frame of the user's code (`File "train.py", line 9 in main`).
std::string with_loops(const std::string& stacks) {
  std::istringstream lines(stacks);
  std::string text, line;
  while (std::getline(lines, line)) {
    const size_t end = line.rfind("\", line ");
    if (line.starts_with("  File \"") && end != std::string::npos && !is_of_a_library(line)) {
      const std::string path = line.substr(8, end - 8);
      const auto number = std::strtoul(line.c_str() + end + 8, nullptr, 10);
      const std::vector<size_t> loops = loops_around(read_text_file(path), number);
      for (size_t i = 0; i < loops.size(); ++i) {
        line += (i == 0 ? ", in the loop of line " : " and of line ") + std::to_string(loops[i]);
      }
    }
    text += line + "\n";
  }
  return text;
}

std::string first_line(const std::string& path) {
  const std::string text = read_text_file(path);
  return text.substr(0, text.find('\n'));
}

std::string state_of(const std::string& tid) {
  const std::string folder = "/proc/self/task/" + tid + "/";
  const std::string name = first_line(folder + "comm");
  if (name.rfind("farandole", 0) == 0) return {};
  const std::string stat = first_line(folder + "stat");
  const size_t at = stat.rfind(')');
  if (at == std::string::npos || at + 2 >= stat.size()) return {};
  std::string text = "thread " + tid + " (" + name + ") " + stat[at + 2];
  const std::string channel = first_line(folder + "wchan");
  if (!channel.empty() && channel != "0") text += " in " + channel;
  const std::string call = first_line(folder + "syscall");
  if (!call.empty() && call != "running") text += ", system call " + call.substr(0, call.find(' '));
  return text + "\n";
}

// Returns the states in /proc of the main thread and of threads that farandole did not start, one line per thread.
std::string thread_states() {
  std::string text = state_of(std::to_string(getpid()));
  std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc/self/task"), &closedir);
  size_t told = 1;
  while (dirent* entry = folder ? readdir(folder.get()) : nullptr) {
    const std::string tid = entry->d_name;
    if (tid[0] == '.' || tid == std::to_string(getpid())) continue;
    const std::string state = state_of(tid);
    if (!state.empty() && told++ < kMaxThreads) text += state;
  }
  return text;
}

StackReporter::Stacks stack_report(const StackSource& source, bool loops) {
  const StackReporter::Stacks report = python_stacks(source);
  std::string stacks = loops ? with_loops(report.text) : report.text;
  std::string text = stacks.empty() ? thread_states() : state_of(std::to_string(getpid())) + stacks;
  if (stacks.empty() && source.socket >= 0) {
    text =
        "Python has not answered: it is exiting, or native code holds its GIL and no signal "
        "reaches the main thread\n" +
        text;
  }
  if (text.size() > kMaxText) text = text.substr(0, text.rfind('\n', kMaxText)) + "\n...";
  return {std::move(text), report.main_alone};
}

}  // namespace

int free_signal() {
  for (int signal = SIGRTMAX - 1; signal >= SIGRTMIN; --signal) {
    if (has_handler(signal, SIG_DFL)) return signal;
  }
  return 0;
}

void make_harmless(int signal) {
  if (!has_handler(signal, SIG_DFL)) return;
  struct sigaction action{};
  action.sa_handler = do_nothing;
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, nullptr);
}

std::vector<size_t> loops_around(const std::string& source, size_t number) {
  std::vector<std::string> lines;
  std::istringstream text(source);
  for (std::string line; lines.size() < number && std::getline(text, line);) lines.push_back(line);
  std::vector<size_t> loops;
  if (lines.size() < number) return loops;
  // Scans upwards from line `number`. A line opens an enclosing block if it is indented less than all lines below it
  // that were scanned.
  size_t least = std::string::npos;
  for (size_t at = number; at > 0; --at) {
    const std::string& line = lines[at - 1];
    const size_t indent = line.find_first_not_of(" \t");
    if (indent == std::string::npos || line[indent] == '#' || indent >= least) continue;
    least = indent;
    const std::string_view rest = std::string_view(line).substr(indent);
    const auto opens = [&](std::string_view word) { return rest.starts_with(word); };
    if (opens("def ") || opens("async def ") || opens("class ")) break;
    if (opens("for ") || opens("while ") || opens("async for ")) loops.insert(loops.begin(), at);
  }
  return loops;
}

StackReporter::~StackReporter() {
  if (thread_.joinable()) thread_.join();
}

void StackReporter::ask(bool with_loops, std::function<void(Stacks)> tell) {
  std::lock_guard lock(mutex_);
  if (std::exchange(busy_, true)) return;
  if (thread_.joinable()) thread_.join();  // the previous thread has made its report and is ending
  try {
    thread_ = start_thread("farandole-stck", [this, with_loops, tell = std::move(tell)] {
      try {
        tell(stack_report(source_, with_loops));
      } catch (const std::exception& error) {
        log(LogLevel::kWarning, std::string("no stack report: ") + error.what());
      }
      std::lock_guard done(mutex_);
      busy_ = false;
    });
  } catch (const std::exception& error) {  // peers see that this rank does not answer
    busy_ = false;
    log(LogLevel::kWarning, std::string("no stack report: ") + error.what());
  }
}

}  // namespace farandole
