// Pure: the way that data takes from one rank to another, from what both said when they joined.
//
// The backends' libraries choose the way by themselves. This states their rule, so that an operator
// sees it beforehand and in GetServerInfo; NCCL_DEBUG=INFO shows what NCCL chose.
#ifndef KERNELS_TRANSPORT_H_
#define KERNELS_TRANSPORT_H_

#include <string>
#include <string_view>
#include <vector>

#include "kernels/device.h"

namespace expertd {

// One rank, as far as the way to it depends on it.
struct TransportFacts {
  // NCCL takes two ranks with the same one to be on one host. NcclHostKey makes it.
  std::string host_key;
  std::string device_uuid;
  std::string pci_bus_id;
  NcclSettings nccl;
};

// NCCL's idea of a host: host name and boot, or NCCL_HOSTID in their place. Containers of one
// machine that have names of their own are several hosts to it.
std::string NcclHostKey(const NcclSettings& settings, std::string_view host,
                        std::string_view boot_id);

struct Transport {
  // "self", "loopback", "gloo tcp", "nvlink p2p", "p2p pcie", "shm", "network" or "unknown".
  std::string name;
  std::string reason;  // why none that is faster; "" when there is nothing to add
};

// `peers`: the GPUs that the process of `self` sees. `self` and `peer` are different ranks.
Transport TransportBetween(std::string_view backend, const TransportFacts& self,
                           const TransportFacts& peer, const std::vector<DevicePeer>& peers);

}  // namespace expertd

#endif  // KERNELS_TRANSPORT_H_
