// SPDX-License-Identifier: Apache-2.0
// Where this user's sockets lie, whoever has been there before. In mount namespaces of their own, since other jobs use
// the same folders.
#include "lib/ipc/socket_folder.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "check.h"
#include "lib/ipc/unix_socket.h"

namespace farandole::check {
namespace {

namespace fs = std::filesystem;

constexpr uid_t kStranger = 65534;
const std::string kName = "farandole-" + std::to_string(geteuid());

// Runs `body` where /tmp and /dev/shm are empty, and there is no runtime folder.
void apart(const std::function<void()>& body) {
  if (geteuid() != 0) skip("needs root, for mounts");
  run_in_fork([&] {
    if (unshare(CLONE_NEWNS) != 0 && errno == EPERM) return;  // where containers forbid it
    CHECK_EQ(mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr), 0);
    for (const char* const place : {"/tmp", "/dev/shm"}) {
      CHECK_EQ(mount("tmpfs", place, "tmpfs", 0, "mode=1777"), 0);
    }
    unsetenv("XDG_RUNTIME_DIR");
    body();
  });
}

void of_stranger(const std::string& path) {
  CHECK_EQ(lchown(path.c_str(), kStranger, kStranger), 0);
}

// The folder that was chosen, or why none.
std::string choice() {
  try {
    return fs::path(socket_folder().prefix).parent_path();
  } catch (const Error& error) {
    CHECK_EQ(error.code(), ErrorCode::kLibrary);
    return error.what();
  }
}

void make_old(const std::string& path) {
  const timespec times[2] = {{1, 0}, {1, 0}};
  CHECK_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

}  // namespace

TEST(the_folder_is_this_users_alone) {
  apart([] {
    CHECK_EQ(choice(), "/tmp/" + kName);
    struct stat found{};
    CHECK_EQ(lstat(choice().c_str(), &found), 0);
    CHECK_EQ(found.st_mode & ALLPERMS, mode_t{0700});
    const SocketFolder here = socket_folder();
    CHECK_EQ(here.identity, socket_folder().identity);
    CHECK_EQ(mount("tmpfs", "/tmp", "tmpfs", 0, "mode=1777"), 0);  // another container's
    CHECK_EQ(here.prefix, socket_folder().prefix);
    CHECK(here.identity != socket_folder().identity);
  });
}

TEST(what_others_have_put_at_its_name_is_passed_by) {
  using Squat = std::function<void(const std::string&)>;
  const Squat squats[] = {
      [](const std::string& path) { CHECK(fs::create_directory(path)), of_stranger(path); },
      [](const std::string& path) { std::ofstream(path) << "", of_stranger(path); },
      [](const std::string& path) { std::ofstream(path) << "", chmod(path.c_str(), 0700); },
      [](const std::string& path) {
        CHECK(fs::create_directory("/tmp/trap"));
        CHECK_EQ(chmod("/tmp/trap", 0777), 0);
        fs::create_symlink("/tmp/trap", path), of_stranger(path);
      },
      [](const std::string& path) { CHECK(fs::create_directory(path)), chmod(path.c_str(), 0755); },
  };
  for (const Squat& squat : squats) {
    apart([&] {
      squat("/tmp/" + kName);
      CHECK_EQ(choice(), "/dev/shm/" + kName);
      CHECK(fs::create_directory("/tmp/runtime"));
      setenv("XDG_RUNTIME_DIR", "/tmp/runtime", 1);
      CHECK_EQ(choice(), "/tmp/runtime/farandole");
      setenv("XDG_RUNTIME_DIR", ("/tmp/" + std::string(100, 'x')).c_str(), 1);
      CHECK_EQ(choice(), "/dev/shm/" + kName);
      CHECK(fs::create_directory("/tmp/a:b"));
      setenv("XDG_RUNTIME_DIR", "/tmp/a:b", 1);
      CHECK_EQ(choice(), "/dev/shm/" + kName);
    });
  }
}

TEST(a_folder_may_be_as_long_as_leaves_room_for_names) {
  apart([] {
    CHECK(fs::create_directory("/tmp/" + kName)), of_stranger("/tmp/" + kName);
    const size_t most = sizeof(sockaddr_un::sun_path) - 1 - 64 - 1;  // "/", a name and the final 0
    for (const size_t bytes : {most, most + 1}) {
      const std::string end = "/farandole";
      const std::string runtime = "/tmp/" + std::string(bytes - 5 - end.size(), 'x');
      CHECK(fs::create_directory(runtime));
      setenv("XDG_RUNTIME_DIR", runtime.c_str(), 1);
      CHECK_EQ(choice(), bytes == most ? runtime + end : "/dev/shm/" + kName);
    }
  });
}

TEST(a_rank_whose_names_are_all_taken_hears_who_has_them) {
  apart([] {
    for (const std::string& path : {"/tmp/" + kName, "/dev/shm/" + kName}) {
      CHECK(fs::create_directory(path)), of_stranger(path);
    }
    CHECK(fs::create_directory("/tmp/home"));
    setenv("HOME", "/tmp/home", 1);
    CHECK_EQ(choice(), "/tmp/home/.farandole");  // which nobody else can take
    setenv("HOME", "/nowhere", 1);
    const UnixListener alone;
    CHECK_EQ(alone.name(), "");
    for (const std::string& text : {choice(), alone.trouble()}) {
      CHECK(contains(text, "/tmp/" + kName + ": belongs to user 65534"));
      CHECK(contains(text, "Remedy: set XDG_RUNTIME_DIR"));
    }
  });
}

TEST(what_a_killed_process_leaves_is_removed_and_nothing_else) {
  const UnixListener lives;
  make_old(lives.name());
  int ends[2];
  CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
  const pid_t child = fork_bound();
  if (child == 0) {
    const UnixListener killed;
    const std::string name = killed.name();
    CHECK_EQ(write(ends[1], name.data(), name.size()), name.size());
    for (;;) pause();
  }
  char name[200] = {};
  CHECK(read(ends[0], name, sizeof name - 1) > 0);
  close(ends[0]), close(ends[1]);
  CHECK_EQ(kill(child, SIGKILL), 0);
  CHECK_EQ(waitpid(child, nullptr, 0), child);
  const std::string file = socket_folder().prefix + "file";
  std::ofstream(file) << "";
  make_old(file);
  socket_folder();
  CHECK(fs::exists(name));  // too young: it may be one that is being made
  make_old(name);
  socket_folder();
  CHECK(!fs::exists(name));
  CHECK(fs::exists(lives.name()));
  CHECK(fs::remove(file));
}

TEST(a_name_goes_with_its_listener_but_not_with_a_forked_copy) {
  std::string name;
  {
    UnixListener first;
    name = first.name();
    run_in_fork([&] { const UnixListener copy(std::move(first)); });
    const UnixListener moved(std::move(first));
    CHECK_EQ(first.name(), "");
    CHECK_EQ(moved.name(), name);
    CHECK(fs::exists(name));
  }
  CHECK(!fs::exists(name));
}

}  // namespace farandole::check
