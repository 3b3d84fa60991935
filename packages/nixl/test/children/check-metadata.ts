// Has metadata checked while the checking process is still starting, and nothing else keeps this
// process alive.
import { nixlTransport } from "@kv/nixl";

const transport = nixlTransport({
  backends: [process.env["NIXL_BACKEND"] ?? ""],
  checkMetadata: true,
});
const [agent, peer] = [await transport.createAgent(), await transport.createAgent()];
const name = await agent.addRemote(await peer.localMetadata());
process.stdout.write(name === peer.name ? "added" : `added ${name}`);
await transport.close();
