// What takes a process down when it is done to NIXL directly, done to the addon: each must end in a KvError, or do no harm.

import { TRAPS_OF_AGENTS } from "./invalid-agent-calls.js";
import { transport } from "./invalid-calls-fixture.js";
import { TRAPS_OF_LISTS } from "./invalid-list-calls.js";

const TRAPS = { ...TRAPS_OF_LISTS, ...TRAPS_OF_AGENTS };

const name = process.argv[2] ?? "";
if (name === "list") process.stdout.write(JSON.stringify(Object.keys(TRAPS)));
else {
  await TRAPS[name]?.();
  await transport.close();
  process.stdout.write("survived");
}
