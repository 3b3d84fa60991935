import { once } from "node:events";
import { createServer } from "node:net";

/** Below the ports that Linux gives to outgoing connections (32768 to 60999). */
const [LOWEST, END] = [20_000, 32_000];

/**
 * For servers that bind later or again (vLLM's side channel, a restarted engine): no outgoing
 * connection takes such a port meanwhile.
 */
export async function freePorts(count: number): Promise<number[]> {
  const ports = new Set<number>();
  while (ports.size < count) {
    const port = LOWEST + Math.floor(Math.random() * (END - LOWEST));
    if (await isFree(port)) ports.add(port);
  }
  return [...ports];
}

async function isFree(port: number): Promise<boolean> {
  const server = createServer().listen(port, "127.0.0.1");
  try {
    await once(server, "listening");
  } catch {
    return false;
  }
  server.close();
  await once(server, "close");
  return true;
}
