// SPDX-License-Identifier: Apache-2.0
#include "watch/stack_reporter.h"

#include <dirent.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
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

constexpr size_t kMaxText = 4000;     // maximum size of a report, in bytes
constexpr size_t kMaxStacks = 65536;  // bytes to read; the default capacity of a pipe
constexpr size_t kMaxThreads = 8;     // number of threads whose states are reported
// Longest wait for the first line. The main thread may be in a system call that delays the signal.
constexpr std::chrono::milliseconds kFirstLine{500};
// Longest wait for a further line. Python does not mark the end of its output, so a longer pause counts as the end.
constexpr std::chrono::milliseconds kNextLine{100};

void do_nothing(int) {}

// True also for 0, which is no signal.
bool has_handler(int signal, void (*handler)(int)) {
  struct sigaction action{};
  return sigaction(signal, nullptr, &action) != 0 ||
         (!(action.sa_flags & SA_SIGINFO) && action.sa_handler == handler);
}

// Waits at most `patience` for bytes. Returns the bytes that have arrived, or "" if there are none.
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
  if (has_handler(source.signal, SIG_DFL)) return {};
  if (has_handler(source.signal, do_nothing)) return {};  // Python is exiting
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

// Moves the main thread's stack to the front. faulthandler writes one stack per thread, in no particular order. It
// marks the main thread, which runs the signal handler, as "Current thread".
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

// Removes farandole's frames from the top of each stack, so that the first frame belongs to the user's code.
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

// Source files that show that a thread never calls farandole. Such threads are DataLoader feeders and pinners, progress
// bars, TensorBoard's writer, and the listener of the elastic agent.
constexpr std::string_view kQuietFiles[] = {
    "/multiprocessing/queues.py", "/torch/utils/data/_utils/pin_memory.py", "/tqdm/_monitor.py",
    "/tensorboard/summary/writer/event_file_writer.py", "/start/agent_client.py"};

// True if every thread with Python frames is the main thread or has a frame in kQuietFiles, and the list is complete.
bool main_is_alone(const std::string& stacks) {
  std::istringstream lines(stacks);
  std::string line;
  bool is_main = false, runs = false, quiet = false, main_seen = false;
  while (std::getline(lines, line)) {
    if (line.starts_with("Thread ") || line.starts_with("Current thread ")) {
      if (runs && !quiet) return false;
      is_main = line.starts_with("Current");
      main_seen |= is_main;
      runs = quiet = false;
    } else if (line.starts_with("  File ")) {
      runs |= !is_main;
      for (std::string_view file : kQuietFiles) quiet |= line.find(file) != std::string::npos;
    } else if (line.find("...") != std::string::npos) {
      return false;  // the list is truncated
    }
  }
  return main_seen && (!runs || quiet);
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
  const std::string all = python_stacks(source);
  const bool alone = main_is_alone(all);
  std::string stacks = without_own_frames(main_thread_first(all), source.own_folders);
  if (loops) stacks = with_loops(stacks);
  std::string text = stacks.empty() ? thread_states() : state_of(std::to_string(getpid())) + stacks;
  if (stacks.empty() && source.signal != 0) {
    text =
        "Python has not answered the signal: its main thread blocks it, or can't run now\n" + text;
  }
  if (text.size() > kMaxText) text = text.substr(0, text.rfind('\n', kMaxText)) + "\n...";
  return {std::move(text), alone};
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
      tell(stack_report(source_, with_loops));
      std::lock_guard done(mutex_);
      busy_ = false;
    });
    // No new thread can be started. Peers will see that this rank does not answer.
  } catch (const std::system_error&) {
    busy_ = false;
  }
}

}  // namespace farandole
