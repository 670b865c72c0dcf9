// Lane: transfers that are under way one after the other, as a row of a profile.
//
// Several may be under way at once, and a profiler's row has room for one: the
// range of a transfer begins where the one before it ends. A thread stands for
// the row. It is made with the first range.
//
// Names      A range has the lane in its name (range.h). The thread is called as
//            the lane is, and most traces show that: it is for the eye alone.
// Ownership  A lane that goes leaves its thread to the next one of that name, so
//            that there are no more threads than lanes were in use at once. What
//            begin() returned may outlive the lane, and is then without meaning.
// Blocking   settle() waits for what has ended to be recorded, for some
//            microseconds; the destructor does too, and gives up what is under
//            way.
// Threads    Every method may be called from any thread.
// Fork       A child has no such thread: there nothing is recorded.
#pragma once

#include <memory>
#include <string>

namespace zero {

class Lane {
 public:
  // At most 15 characters.
  explicit Lane(std::string name);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // The transfer `what` is under way until the last copy of what is returned is gone.
  // Null where no profiler runs, or no thread can be had.
  std::shared_ptr<void> begin(const std::string& what);

  void settle();

 private:
  struct Row;
  class Rows;
  std::shared_ptr<Row> row_;
};

}  // namespace zero
