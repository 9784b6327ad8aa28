// SPDX-License-Identifier: Apache-2.0
#include "runtime/surroundings.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "lib/mpi/mpi.h"
#include "lib/net/interfaces.h"

namespace farandole {

std::string text_of_mpi() {
  const std::optional<MpiLibrary> mpi = mpi_of_process();
  return mpi ? mpi->file + "\n" + mpi->abi + "\n" + mpi->version : "";
}

std::string text_of_addresses(const std::string& wanted) {
  const std::vector<Interface> all = interfaces();
  std::string text;
  for (const std::string& address : addresses_of(all, wanted)) {
    const auto of = std::ranges::find(all, address, &Interface::address);
    if (!of->loopback) text += of->name + " " + address + "\n";
  }
  return text;
}

}  // namespace farandole
