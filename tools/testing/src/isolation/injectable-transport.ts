import type { Notification, Transport } from "@kv/interface";

/**
 * Agents get forged notifications besides the real ones. `rewrite` changes each payload on its way:
 * so a test takes out a check of the receiver.
 */
export function injectableTransport(
  rewrite: (payload: Uint8Array) => Uint8Array = (payload) => payload,
  sent: (payload: Uint8Array) => void = () => {},
) {
  const inboxes: ((payload: Uint8Array) => void)[] = [];
  return {
    /** As from each agent that the receiver knows, and from an unknown one. */
    inject(payload: Uint8Array): void {
      for (const inbox of inboxes) inbox(payload);
    },
    wrap: (transport: Transport): Transport => ({
      ...transport,
      async createAgent(options) {
        const agent = await transport.createAgent(options);
        const known = new Set<string>();
        const forged: Notification[] = [];
        let wake: () => void = () => {};
        inboxes.push((payload) => {
          for (const from of ["a stranger", ...known]) forged.push({ from, payload });
          wake();
        });
        return {
          ...agent,
          async addRemote(metadata) {
            const name = await agent.addRemote(metadata);
            known.add(name);
            return name;
          },
          async notify(remote, payload) {
            sent(payload);
            await agent.notify(remote, payload);
          },
          async *notifications() {
            const real = agent.notifications();
            let next = real.next();
            for (;;) {
              const woken = new Promise<undefined>((resolve) => {
                wake = () => resolve(undefined);
              });
              const arrived = forged.length > 0 ? undefined : await Promise.race([next, woken]);
              for (const { from, payload } of forged.splice(0))
                yield { from, payload: rewrite(payload) };
              if (arrived === undefined) continue;
              if (arrived.done === true) return;
              next = real.next();
              yield { from: arrived.value.from, payload: rewrite(arrived.value.payload) };
            }
          },
        };
      },
    }),
  };
}
