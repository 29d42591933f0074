// The places in resident tensors that an operation names: found at admission, checked, let go of.
#ifndef SERVER_ENGINE_BUFFER_PLACES_H_
#define SERVER_ENGINE_BUFFER_PLACES_H_

#include "absl/status/status.h"
#include "server/engine/operations.h"
#include "server/engine/tensor_store.h"

namespace expertd::engine {

// Finds every tensor that `op` names and keeps it until ReleasePlaces; places of inputs are
// checked. Reported all at once, each under its path:
//   BUFFER_UNKNOWN: no such tensor in this epoch;
//   DTYPE_UNSUPPORTED: the tensor has another dtype than what the request says;
//   BUFFER_RANGE: the place is not inside the tensor, or does not begin at an element.
absl::Status PinPlaces(Operation& op, const TensorStore& store);

// Checks the places of results, once the operation's own check has set the dtype and shape of each
// result that will be there. Errors: as PinPlaces; BUFFER_RANGE too for a place that overlaps with
// that of another tensor of the request; CONFIG_INVALID for one of a result that will not be there.
absl::Status CheckResultPlaces(Operation& op);

// Whether any result goes into a resident tensor.
bool HasResultPlaces(Operation& op);
// A step is about to write to them.
void TouchResultPlaces(Operation& op);
// What a failure that comes after TouchResultPlaces must say of them.
absl::Status WithTouchedPlaces(Operation& op, const absl::Status& status);

void ReleasePlaces(Operation& op);

}  // namespace expertd::engine

#endif  // SERVER_ENGINE_BUFFER_PLACES_H_
