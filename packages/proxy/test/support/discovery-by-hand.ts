import type { Discovery } from "@kv/fleet";

/** A discovery that finds, and fails, when a test says so. */
export function discoveryByHand() {
  type Watch = Parameters<Discovery["watch"]>;
  const discovery = {
    isClosed: false,
    found: (() => {}) as Watch[0],
    failed: (() => {}) as Watch[1],
    create: (): Discovery => ({
      name: "by hand",
      watch(found, failed) {
        Object.assign(discovery, { found, failed });
        return {
          close() {
            discovery.isClosed = true;
          },
        };
      },
    }),
  };
  return discovery;
}
