import type { Socket } from "node:net";
import { remoteAddressKey } from "@kv/interface";

/** The sessions of a target: bounded in all and per remote address. */
export class Sessions {
  readonly #limits: { readonly maxSessions: number; readonly maxSessionsPerAddress: number };
  readonly #running = new Map<Socket, Promise<void>>();
  readonly #perAddress = new Map<string, number>();

  constructor(limits: { readonly maxSessions: number; readonly maxSessionsPerAddress: number }) {
    this.#limits = limits;
  }

  /** Runs a session, or calls `refuse` with the reason. */
  begin(socket: Socket, refuse: (reason: string) => void, run: () => Promise<void>): void {
    const { maxSessions, maxSessionsPerAddress } = this.#limits;
    const address = remoteAddressKey(socket.remoteAddress ?? "");
    const own = this.#perAddress.get(address) ?? 0;
    if (this.#running.size >= maxSessions) {
      refuse(`the target has ${maxSessions} sessions, its limit`);
      return;
    }
    if (own >= maxSessionsPerAddress) {
      refuse(`the target has ${maxSessionsPerAddress} sessions of ${address}, its limit for one address`);
      return;
    }
    this.#perAddress.set(address, own + 1);
    const session = run().finally(() => {
      this.#running.delete(socket);
      const left = (this.#perAddress.get(address) ?? 1) - 1;
      if (left === 0) this.#perAddress.delete(address);
      else this.#perAddress.set(address, left);
    });
    this.#running.set(socket, session);
  }

  /** Disconnects every session and waits until it has freed its memory. */
  async close(): Promise<void> {
    for (const socket of this.#running.keys()) socket.destroy();
    await Promise.all(this.#running.values());
  }
}
