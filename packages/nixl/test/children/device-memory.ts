// Registers host addresses as device memory, with and without the check, and reports the outcomes.
import { KvError } from "@kv/interface";
import { deviceMemory, nixlTransport } from "@kv/nixl";

const backend = process.argv[2] ?? "";
const transport = nixlTransport({ backends: [backend] });
const agent = await transport.createAgent();
const memory = transport.allocate(1 << 16);
const outcomes: unknown[] = [];
for (const address of [memory.address, 2 ** 46 + 2 ** 20]) {
  for (const check of ["cuda", "none"] as const) {
    try {
      await agent.register(deviceMemory({ address, lengthBytes: 1 << 16, deviceId: 0, check }));
      outcomes.push({ check, code: "registered" });
    } catch (error) {
      if (!KvError.is(error)) throw error;
      const { code, message, hint } = error;
      outcomes.push({ check, code, message, hint });
    }
  }
}
await transport.close();
process.stdout.write(`\n${JSON.stringify(outcomes)}`);
