// SPDX-License-Identifier: Apache-2.0
// Finds the folder for this user's Unix sockets, for both the core and the Python package. No other user can enter the
// folder, so no other user can connect to these sockets or take their names. May be called from any thread.
#pragma once

#include <string>

namespace farandole {

struct SocketFolder {
  // Start of the paths of sockets. The rest of a path has at most 64 bytes, without commas, colons and blanks.
  std::string prefix;
  // Host, device and inode. The text is the same in all processes that can reach each other's sockets.
  std::string identity;
};

// Returns the first usable folder of /tmp/farandole-UID, $XDG_RUNTIME_DIR/farandole, /dev/shm/farandole-UID and
// ~/.farandole. Creates the folder, and removes the sockets of processes that have ended. Throws Error(kLibrary) with a
// remedy if no folder is usable.
SocketFolder socket_folder();

}  // namespace farandole
