// Calls that crash a process when they are made to NIXL directly. Made to the addon, each must end
// in a KvError or do no harm.

import { INVALID_AGENT_CALLS } from "./invalid-agent-calls.js";
import { transport } from "./invalid-calls-fixture.js";
import { INVALID_LIST_CALLS } from "./invalid-list-calls.js";

const INVALID_CALLS = { ...INVALID_LIST_CALLS, ...INVALID_AGENT_CALLS };

const name = process.argv[2] ?? "";
if (name === "list") process.stdout.write(JSON.stringify(Object.keys(INVALID_CALLS)));
else {
  await INVALID_CALLS[name]?.();
  await transport.close();
  process.stdout.write("survived");
}
