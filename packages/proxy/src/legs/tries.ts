import type { Instance, PooledInstance, Visit } from "@kv/fleet";
import type { Deadline } from "@kv/fleet/front-end";
import type { Clock, KvError } from "@kv/interface";
import { type Fault, isBadAnswer, isKept } from "../upstream/upstream-errors.js";

/** How often a leg leaves an instance that refuses it or is busy. */
const MOST_MOVES = 2;
/** How long a leg waits before it tries the only instance again. */
const WAIT_MS = 250;

/**
 * Decides who is blamed for a leg's tries and whether another follows. A request that breaks one
 * instance is tried at only one other, so that it cannot break all.
 */
export class Tries {
  /** Chosen only when no other is left: tried before, full, or without the model. */
  readonly avoided = new Set<Instance>();
  readonly tried = new Set<Instance>();
  /** The next try uses a new connection: all kept ones may be dead. */
  fresh = false;
  #broke = false;
  #moves = 0;
  #waited = false;
  /** Refusals count as failures if another instance answers. */
  #refused: { readonly visit: Visit; readonly error: KvError }[] = [];

  /** Ends a faulty visit now, or once other answers show who is to blame. */
  blame(visit: Visit, fault: Fault, error: KvError): void {
    if (fault === "refused") this.#refused.push({ visit, error });
    else if (fault === "kept") visit.abandoned();
    else if (fault === "lacks-model") visit.succeeded();
    else visit.failed(error);
    if (fault === "kept") return;
    this.avoided.add(visit.instance);
    this.tried.add(visit.instance);
  }

  answered(): void {
    for (const { visit, error } of this.#refused.splice(0)) visit.failed(error);
  }

  end(): void {
    for (const { visit } of this.#refused.splice(0)) visit.abandoned();
  }

  /**
   * Whether to try again: at another instance of `all`, or at the only one after a short wait.
   * @throws The deadline's reason.
   */
  async again(
    fault: Fault | undefined,
    all: readonly PooledInstance[],
    deadline: Deadline,
    clock: Clock,
  ): Promise<boolean> {
    if (fault === "kept") {
      const isFirst = !this.fresh;
      this.fresh = true;
      return isFirst;
    }
    if (fault !== "busy" && fault !== "refused" && fault !== "broken") return false;
    if (fault === "broken") {
      if (this.#broke) return false;
      this.#broke = true;
    }
    const ready = all.filter((one) => one.available());
    if (ready.some((one) => !this.tried.has(one))) {
      this.#moves += 1;
      return this.#moves <= MOST_MOVES;
    }
    if (ready.length > 1 || fault === "refused" || this.#waited) return false;
    this.#waited = true;
    await pause(WAIT_MS, deadline, clock);
    return true;
  }
}

export class Attempts {
  readonly prefill = new Tries();
  readonly decode = new Tries();
  /** How often the part may move to a prefill instance with other pairs. */
  pairs = 1;

  avoid(instances: Iterable<Instance> = []): void {
    for (const instance of instances) {
      this.prefill.avoided.add(instance);
      this.decode.avoided.add(instance);
    }
  }

  end(): void {
    this.prefill.end();
    this.decode.end();
  }
}

/**
 * Blocks that P holds for one decode leg. They need a release unless D generates, because D then
 * frees them. A second release is harmless.
 */
export class HeldBlocks {
  #taken = false;
  /** Status of the last complete answer that was no generation. */
  #status: number | undefined;

  /** D frees the blocks when its connection ends. A release could free them under its DMA reads. */
  readonly sent = (): void => {
    this.#taken = true;
  };

  /** A complete answer with this status is no generation. */
  answered(status: number): void {
    this.#taken = false;
    this.#status = status;
  }

  /**
   * A 200 that breaks off may be a generation. A request on a kept connection that closed was
   * hardly read.
   */
  failed(status: number | undefined, error: unknown): void {
    const isUntaken = status === undefined ? isKept(error) : status !== 200 || isBadAnswer(error);
    if (!isUntaken) return;
    this.#taken = false;
    this.#status = status;
  }

  get isTaken(): boolean {
    return this.#taken;
  }

  /**
   * Whether surely no engine has the parameters. A 200, 500, or 502 to 504 may be the engine's own.
   */
  get isUnseen(): boolean {
    return this.#status === undefined || !MAY_BE_OF_ENGINE.has(this.#status);
  }
}

const MAY_BE_OF_ENGINE: ReadonlySet<number> = new Set([200, 500, 502, 503, 504]);

function pause(ms: number, deadline: Deadline, clock: Clock): Promise<void> {
  return new Promise((resolve, reject) => {
    const timer = clock.setTimer(() => {
      stopListening();
      resolve();
    }, ms);
    const stopListening = deadline.onAbort(() => {
      timer.cancel();
      reject(deadline.reason);
    });
  });
}
