// Has metadata checked at once, while the process that checks is still starting, with nothing else to stay alive for.
import { nixlTransport } from "@kv/nixl";

const transport = nixlTransport({ backends: [process.env["NIXL_BACKEND"] ?? ""], checkMetadata: true });
const [agent, peer] = [await transport.createAgent(), await transport.createAgent()];
const name = await agent.addRemote(await peer.localMetadata());
process.stdout.write(name === peer.name ? "added" : `added ${name}`);
await transport.close();
