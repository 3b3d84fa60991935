import type { Discovery } from "./discovery.js";

/** A discovery whose last reading is known to have succeeded or failed. */
export class ObservedDiscovery implements Discovery {
  readonly name: string;
  readonly #discovery: Discovery;
  /** False before the first reading. While it is, the instances are those of the last one that succeeded. */
  isCurrent = false;

  constructor(discovery: Discovery) {
    this.name = discovery.name;
    this.#discovery = discovery;
  }

  watch(onChange: Parameters<Discovery["watch"]>[0], onError: Parameters<Discovery["watch"]>[1]) {
    return this.#discovery.watch(
      (found) => {
        this.isCurrent = true;
        onChange(found);
      },
      (error) => {
        this.isCurrent = false;
        onError(error);
      },
    );
  }
}
