// SPDX-License-Identifier: Apache-2.0
// Finds the folder of this user's Unix sockets, for the core and the Python package. No other user can enter the
// folder, so none can connect to these sockets or take their names. Any thread.
#pragma once

#include <string>

namespace farandole {

struct SocketFolder {
  // Start of socket paths. At most 64 bytes follow, without comma, colon or blank.
  std::string prefix;
  // Host, device and inode: equal for processes that can reach each other's sockets.
  std::string identity;
};

// Returns the first usable of /tmp/farandole-UID, $XDG_RUNTIME_DIR/farandole, /dev/shm/farandole-UID, ~/.farandole.
// Creates the folder, and removes sockets of ended processes. Throws Error(kLibrary) with a remedy if none is usable.
SocketFolder socket_folder();

}  // namespace farandole
