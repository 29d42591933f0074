// Real objects of the engine as small numbers, so that states of a model stay a few bytes.
//
// Two objects share a number when their fingerprints, taken through the public interface, are
// equal.
#ifndef TESTS_MODEL_INTERNED_H_
#define TESTS_MODEL_INTERNED_H_

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace expertd::model {

template <typename Object>
class Interned {
 public:
  // What a call on the object with number `id` made of it, and what the call said.
  struct Result {
    uint16_t id = 0;
    uint8_t said = 0;
  };

  explicit Interned(std::function<std::string(const Object&)> fingerprint)
      : fingerprint_(std::move(fingerprint)) {}

  uint16_t Add(Object object) {
    const auto next = static_cast<uint16_t>(objects_.size());
    const auto [found, added] = ids_.emplace(fingerprint_(object), next);
    if (added) objects_.push_back(std::move(object));
    return found->second;
  }

  const Object& operator[](uint16_t id) const { return objects_[id]; }
  size_t size() const { return objects_.size(); }

  // Calls `call` on a copy of object `id`, once for each `name` of the call with its arguments.
  template <typename Call>
  Result Apply(uint16_t id, uint32_t name, const Call& call) {
    const uint64_t key = (uint64_t{id} << 32) | name;
    if (const auto found = calls_.find(key); found != calls_.end()) return found->second;
    Object copy = objects_[id];
    Result result;
    result.said = static_cast<uint8_t>(call(copy));
    result.id = Add(std::move(copy));
    calls_.emplace(key, result);
    return result;
  }

 private:
  std::function<std::string(const Object&)> fingerprint_;
  std::vector<Object> objects_;
  std::unordered_map<std::string, uint16_t> ids_;
  std::unordered_map<uint64_t, Result> calls_;
};

}  // namespace expertd::model

#endif  // TESTS_MODEL_INTERNED_H_
