// SPDX-License-Identifier: Apache-2.0
#include "watch/stack_reporter.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <span>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "lib/os/text_file.h"
#include "lib/os/thread.h"

namespace farandole {
namespace {

constexpr size_t kMaxText = 4000;     // bytes of a report
constexpr size_t kMaxStacks = 65536;  // bytes read from the pipe, more than it can hold
constexpr size_t kMaxThreads = 8;     // whose states are reported
constexpr std::chrono::milliseconds kFirstLine{
    500};  // Python's main thread may be in a long native call
constexpr std::chrono::milliseconds kNextLine{100};  // Python writes lines, without an end mark

void do_nothing(int) {}

bool has_handler(int signal, void (*handler)(int)) {
  struct sigaction action{};
  return sigaction(signal, nullptr, &action) != 0 ||
         (!(action.sa_flags & SA_SIGINFO) && action.sa_handler == handler);
}

// What arrives within `patience`; empty: nothing.
std::string read_pipe(int fd, std::chrono::milliseconds patience) {
  const Deadline deadline = Deadline::in(patience);
  pollfd event{fd, POLLIN, 0};
  while (poll(&event, 1, deadline.poll_ms()) < 0 && !deadline.expired()) {
  }
  char block[4096];
  const ssize_t got = (event.revents & POLLIN) ? read(fd, block, sizeof block) : 0;
  return got > 0 ? std::string(block, static_cast<size_t>(got)) : std::string();
}

std::string python_stacks(const StackSource& source) {
  if (source.signal == 0 || has_handler(source.signal, SIG_DFL)) return {};
  if (has_handler(source.signal, do_nothing)) return {};  // Python exits: its handler is gone
  while (!read_pipe(source.pipe, std::chrono::milliseconds{0}).empty()) {
  }
  const pid_t pid = getpid();
  if (syscall(SYS_tgkill, pid, pid, source.signal) != 0) return {};
  std::string text = read_pipe(source.pipe, kFirstLine);
  while (!text.empty() && text.size() < kMaxStacks) {
    const std::string more = read_pipe(source.pipe, kNextLine);
    if (more.empty()) break;
    text += more;
  }
  return text;
}

// faulthandler writes one block per thread, with the current one (here the main thread) anywhere among them.
// Moves that block to the front.
std::string main_thread_first(const std::string& stacks) {
  const size_t at = stacks.find("Current thread");
  if (at == std::string::npos || at == 0) return stacks;
  const size_t end = std::min(stacks.find("\n\n", at), stacks.size());
  return stacks.substr(at, end - at) + "\n" + stacks.substr(0, at) + stacks.substr(end);
}

bool is_in(std::string_view line, std::span<const std::string> folders) {
  return std::ranges::any_of(folders, [&](const std::string& folder) {
    return line.starts_with("  File \"" + folder + "/");
  });
}

// Leaves out the library's frames on top of each stack, so that the first line is the user's.
std::string without_own_frames(const std::string& stacks, std::span<const std::string> folders) {
  std::istringstream lines(stacks);
  std::string text, line;
  bool on_top = true;
  while (std::getline(lines, line)) {
    if (!line.starts_with("  File ")) {
      on_top = true;
    } else if (on_top && is_in(line, folders)) {
      continue;
    } else {
      on_top = false;
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

// What /proc says of the main thread and the other threads that are not ours; one line each.
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

std::string stack_report(const StackSource& source) {
  std::string stacks =
      without_own_frames(main_thread_first(python_stacks(source)), source.own_folders);
  std::string text = stacks.empty() ? thread_states() : state_of(std::to_string(getpid())) + stacks;
  if (stacks.empty() && source.signal != 0) {
    text = "Python has not answered the signal: its main thread blocks it, or can't be reached\n" +
           text;
  }
  if (text.size() <= kMaxText) return text;
  return text.substr(0, text.rfind('\n', kMaxText)) + "\n...";
}

}  // namespace

int free_signal() {
  for (int signal = SIGRTMAX - 1; signal >= SIGRTMIN; --signal) {
    if (has_handler(signal, SIG_DFL)) return signal;
  }
  return 0;
}

void make_harmless(int signal) {
  if (signal == 0 || !has_handler(signal, SIG_DFL)) return;
  struct sigaction action{};
  action.sa_handler = do_nothing;
  action.sa_flags = SA_RESTART;
  sigaction(signal, &action, nullptr);
}

StackReporter::~StackReporter() {
  if (thread_.joinable()) thread_.join();
}

void StackReporter::ask(std::function<void(std::string)> tell) {
  std::lock_guard lock(mutex_);
  if (std::exchange(busy_, true)) return;
  if (thread_.joinable()) thread_.join();  // it has reported and is ending
  try {
    thread_ = start_thread("farandole-stck", [this, tell = std::move(tell)] {
      tell(stack_report(source_));
      std::lock_guard done(mutex_);
      busy_ = false;
    });
  } catch (const std::system_error&) {  // no thread available: others see that we don't answer
    busy_ = false;
  }
}

}  // namespace farandole
