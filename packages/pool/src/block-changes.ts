import { randomUUID } from "node:crypto";
import { nameOf } from "@kv/tier";

/** A part of a pool's history. */
export interface ChangesPage {
  /** Another one than the reader's: what the reader has is void, and this page begins at 0. */
  readonly epoch: string;
  /** What the reader asks for next. */
  readonly next: number;
  readonly more: boolean;
  /** `+` or `-`, and a block's key in base64. */
  readonly changes: readonly string[];
}

interface Change {
  readonly key: Uint8Array;
  readonly isAdded: boolean;
}

/** A page fits into 64 KiB. */
const PAGE_CHANGES = 1000;
const MIN_HISTORY = 2 ** 16;

/** Which keys a pool has, as a history that routers follow. */
export class BlockChanges {
  #epoch = randomUUID();
  #history: Change[] = [];
  #present = 0;

  added(key: Uint8Array): void {
    this.#present += 1;
    this.#history.push({ key, isAdded: true });
  }

  removed(key: Uint8Array): void {
    this.#present -= 1;
    this.#history.push({ key, isAdded: false });
    if (this.#history.length > MIN_HISTORY + 2 * this.#present) this.#beginAgain();
  }

  page(epoch: string, after: number): ChangesPage {
    const isKnown = epoch === this.#epoch && after >= 0 && after <= this.#history.length;
    const begin = isKnown ? after : 0;
    const next = Math.min(begin + PAGE_CHANGES, this.#history.length);
    const changes = this.#history
      .slice(begin, next)
      .map(({ key, isAdded }) => `${isAdded ? "+" : "-"}${Buffer.from(key).toString("base64")}`);
    return { epoch: this.#epoch, next, more: next < this.#history.length, changes };
  }

  /** The history has more blocks that have left than present ones. */
  #beginAgain(): void {
    const present = new Map<string, Change>();
    for (const change of this.#history) {
      const name = nameOf(change.key);
      if (change.isAdded) present.set(name, change);
      else present.delete(name);
    }
    this.#history = [...present.values()];
    this.#epoch = randomUUID();
  }
}
