/** A timer of a virtual clock. */
export interface QueuedTimer {
  readonly atMs: number;
  readonly sequence: number;
  readonly run: () => void;
  cancelled: boolean;
}

/**
 * Timers by time, then by insertion: a binary heap that drops cancelled entries when they outnumber
 * the others.
 */
export class TimerQueue {
  #heap: QueuedTimer[] = [];
  #sequence = 0;
  #live = 0;

  /** Timers that have neither fired nor been cancelled. */
  get size(): number {
    return this.#live;
  }

  add(run: () => void, atMs: number): QueuedTimer {
    const timer: QueuedTimer = { atMs, sequence: this.#sequence++, run, cancelled: false };
    this.#push(timer);
    this.#live += 1;
    return timer;
  }

  cancel(timer: QueuedTimer): void {
    if (timer.cancelled) return;
    timer.cancelled = true;
    this.#live -= 1;
    if (this.#heap.length > 1024 && this.#heap.length > 2 * this.#live) this.#sweep();
  }

  /** Returns the next timer and leaves it in the queue. */
  peek(): QueuedTimer | undefined {
    for (;;) {
      const top = this.#heap[0];
      if (top === undefined || !top.cancelled) return top;
      this.#removeTop();
    }
  }

  /** Returns the next timer and removes it from the queue. */
  take(): QueuedTimer | undefined {
    const top = this.peek();
    if (top === undefined) return undefined;
    this.#removeTop();
    // A timer that fired counts as cancelled, so that a later `cancel` does not change the size.
    top.cancelled = true;
    this.#live -= 1;
    return top;
  }

  #push(timer: QueuedTimer): void {
    const heap = this.#heap;
    let index = heap.length;
    heap.push(timer);
    while (index > 0) {
      const parentIndex = (index - 1) >> 1;
      const parent = heap[parentIndex] as QueuedTimer;
      if (!before(timer, parent)) break;
      heap[index] = parent;
      index = parentIndex;
    }
    heap[index] = timer;
  }

  #removeTop(): void {
    const heap = this.#heap;
    const last = heap.pop();
    if (last === undefined || heap.length === 0) return;
    let index = 0;
    for (;;) {
      let childIndex = 2 * index + 1;
      const left = heap[childIndex];
      if (left === undefined) break;
      const right = heap[childIndex + 1];
      let child = left;
      if (right !== undefined && before(right, left)) {
        child = right;
        childIndex += 1;
      }
      if (!before(child, last)) break;
      heap[index] = child;
      index = childIndex;
    }
    heap[index] = last;
  }

  #sweep(): void {
    const kept = this.#heap.filter((timer) => !timer.cancelled);
    this.#heap = [];
    for (const timer of kept) this.#push(timer);
  }
}

const before = (a: QueuedTimer, b: QueuedTimer): boolean =>
  a.atMs < b.atMs || (a.atMs === b.atMs && a.sequence < b.sequence);
