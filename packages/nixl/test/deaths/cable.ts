import { spawnSync } from "node:child_process";

const ip = (...args: string[]): boolean => spawnSync("ip", args, { stdio: "ignore" }).status === 0;

/**
 * A network namespace for a peer, with a link to this one that can be cut. Needs root and iproute2.
 */
export class Cable {
  /** The name of the link's end on this side. */
  readonly device: string;
  readonly #namespace: string;

  /**
   * Two cables of one machine need different numbers, below 250. Throws where the machine does not
   * allow it.
   */
  constructor(number: number) {
    this.device = `kvcable${number}`;
    this.#namespace = `kv-cable-${number}`;
    const made =
      ip("netns", "add", this.#namespace) &&
      ip(
        "link",
        "add",
        this.device,
        "type",
        "veth",
        "peer",
        "name",
        this.peerDevice,
        "netns",
        this.#namespace,
      ) &&
      ip("addr", "add", `10.211.${number}.1/24`, "dev", this.device) &&
      ip("link", "set", this.device, "up") &&
      ip("-n", this.#namespace, "addr", "add", `10.211.${number}.2/24`, "dev", this.peerDevice) &&
      this.mend();
    if (made) return;
    this.remove();
    throw new Error("a network namespace cannot be made here");
  }

  /** The name of the link's end on the peer's side. */
  get peerDevice(): string {
    return `${this.device}p`;
  }

  /** What stands before a command that is to run on the other side. */
  get prefix(): readonly string[] {
    return ["ip", "netns", "exec", this.#namespace];
  }

  /** Nothing passes from now on, and nobody is told. */
  cut(): void {
    ip("-n", this.#namespace, "link", "set", this.peerDevice, "down");
  }

  /** The link is as new. */
  mend(): boolean {
    return (
      ip("-n", this.#namespace, "link", "set", "lo", "up") &&
      ip("-n", this.#namespace, "link", "set", this.peerDevice, "up")
    );
  }

  /** Removes the namespace and the link. */
  remove(): void {
    ip("link", "del", this.device);
    ip("netns", "del", this.#namespace);
  }
}

/** Why cables cannot be cut on this machine; undefined when they can. */
export function cablesMissing(): string | undefined {
  try {
    new Cable(249).remove();
    return undefined;
  } catch {
    return "needs root, iproute2 and network namespaces";
  }
}
