// Length-prefixed entries; total on any input when read back.
#include "kernels/cpu/gloo_address.h"

#include <cstdint>

namespace expertd {

std::string EncodeAddresses(const std::vector<std::vector<char>>& addresses) {
  std::string blob;
  for (const std::vector<char>& address : addresses) {
    const auto size = static_cast<uint32_t>(address.size());
    for (int shift = 0; shift < 32; shift += 8) blob.push_back(static_cast<char>(size >> shift));
    blob.append(address.begin(), address.end());
  }
  return blob;
}

std::optional<std::vector<char>> DecodeAddress(std::string_view blob, size_t rank, size_t world) {
  std::optional<std::vector<char>> found;
  for (size_t entry = 0; entry < world; ++entry) {
    if (blob.size() < 4) return std::nullopt;
    uint32_t size = 0;
    for (size_t i = 4; i-- > 0;) size = (size << 8) | static_cast<uint8_t>(blob[i]);
    blob.remove_prefix(4);
    if (blob.size() < size) return std::nullopt;
    if (entry == rank) found.emplace(blob.begin(), blob.begin() + size);
    blob.remove_prefix(size);
  }
  return blob.empty() ? found : std::nullopt;
}

}  // namespace expertd
