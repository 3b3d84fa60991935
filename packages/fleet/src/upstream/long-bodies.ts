import { Readable } from "node:stream";
import { type Clock, YieldingQueue } from "@kv/interface";

/** What is handed to a connection in one turn of the event loop. */
const SENT_AT_ONCE_BYTES = 64 * 1024;
/** Pieces that leave within a few turns. */
const MOST_READY_PIECES = 4;

/** The long bodies that are being sent, in turns with one another and with other work. */
export class LongBodies {
  readonly #turns: YieldingQueue;

  constructor(clock: Clock) {
    this.#turns = new YieldingQueue({ clock });
  }

  /**
   * Whether more pieces are ready than leave within a few turns. Those that an instance does not
   * read are not.
   */
  get isBusy(): boolean {
    return this.#turns.length >= MOST_READY_PIECES;
  }

  /**
   * The headers and the body of a request. The pieces are sent one after another, and not copied.
   */
  send<Headers extends object>(headers: Headers, pieces: readonly Uint8Array[]) {
    const length = pieces.reduce((sum, piece) => sum + piece.length, 0);
    const body = Readable.from(this.#inTurns(pieces), { highWaterMark: 1 });
    return { headers: { ...headers, "content-length": String(length) }, body };
  }

  async *#inTurns(pieces: readonly Uint8Array[]): AsyncGenerator<Uint8Array> {
    for (const piece of pieces)
      for (let at = 0; at < piece.length; at += SENT_AT_ONCE_BYTES) {
        if (piece.length > SENT_AT_ONCE_BYTES) await this.#turns.turn();
        yield piece.subarray(at, at + SENT_AT_ONCE_BYTES);
      }
  }
}
