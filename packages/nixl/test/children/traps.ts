// What takes a process down when it is done to NIXL directly, done to the addon: each must end in a KvError, or do no harm.
import { transport } from "./trap-ground.js";
import { TRAPS_OF_AGENTS } from "./traps-of-agents.js";
import { TRAPS_OF_LISTS } from "./traps-of-lists.js";

const TRAPS = { ...TRAPS_OF_LISTS, ...TRAPS_OF_AGENTS };

const name = process.argv[2] ?? "";
if (name === "list") process.stdout.write(JSON.stringify(Object.keys(TRAPS)));
else {
  await TRAPS[name]?.();
  await transport.close();
  process.stdout.write("survived");
}
