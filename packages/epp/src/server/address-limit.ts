import type { Socket } from "node:net";

/** Bounds the open connections of each remote address. */
export class AddressLimit {
  readonly #most: number;
  readonly #open = new Map<string, number>();

  constructor(most: number) {
    this.#most = most;
  }

  /** Counts a new connection until it closes, or ends it where its address has the most connections already. Returns whether it stays open. */
  admit(socket: Socket): boolean {
    const address = socket.remoteAddress ?? "";
    const open = this.#open.get(address) ?? 0;
    if (open >= this.#most) {
      socket.on("error", () => {});
      socket.destroy();
      return false;
    }
    this.#open.set(address, open + 1);
    socket.once("close", () => {
      const left = (this.#open.get(address) ?? 1) - 1;
      if (left > 0) this.#open.set(address, left);
      else this.#open.delete(address);
    });
    return true;
  }
}
