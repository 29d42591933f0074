// Every way to get one field of a request wrong, found by reflection over the message.
#ifndef TESTS_TESTING_SPOIL_H_
#define TESTS_TESTING_SPOIL_H_

#include <memory>
#include <string>
#include <vector>

#include "google/protobuf/message.h"

namespace expertd::testing {

// One wrong request: `label` is "tokens.shape[0]=max".
struct Spoilt {
  std::string label;
  std::unique_ptr<google::protobuf::Message> request;
};

// Copies of `valid`, each with one field changed: numbers to 0, -1, the neighbour and the limits,
// floating point to NaN, infinity and -1, text to nothing, something unknown and something long,
// payloads one byte off, lists one element off, messages left out, choices to others. Fields that
// are absent in `valid` are given one value each. Differs from `valid` in every copy.
std::vector<Spoilt> SpoilEveryField(const google::protobuf::Message& valid);

}  // namespace expertd::testing

#endif  // TESTS_TESTING_SPOIL_H_
