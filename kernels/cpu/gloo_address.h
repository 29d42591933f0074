// The address blob that the ranks of a gloo group exchange: one listening address per peer.
#ifndef KERNELS_CPU_GLOO_ADDRESS_H_
#define KERNELS_CPU_GLOO_ADDRESS_H_

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace expertd {

// addresses[i]: where rank i reaches this rank; empty for the rank itself.
std::string EncodeAddresses(const std::vector<std::vector<char>>& addresses);
// Entry `rank` of an encoded blob; nothing when the blob does not hold exactly `world` entries.
std::optional<std::vector<char>> DecodeAddress(std::string_view blob, size_t rank, size_t world);

}  // namespace expertd

#endif  // KERNELS_CPU_GLOO_ADDRESS_H_
