import { isIPv6 } from "node:net";

/**
 * Names the client behind an IP address, for limits per client. Of an IPv6 address only the first 64 bits count, because one host has all
 * addresses below them. An IPv4 address that is written as IPv6 is the IPv4 address.
 */
export function clientAddress(address: string | undefined): string {
  if (address === undefined) return "local";
  if (address.startsWith("::ffff:") && address.includes(".")) return address.slice("::ffff:".length);
  if (!isIPv6(address)) return address;
  const [before = "", after] = (address.split("%", 1)[0] ?? "").split("::");
  const groups = before === "" ? [] : before.split(":");
  if (after !== undefined) {
    const tail = after === "" ? [] : after.split(":");
    while (groups.length + tail.length < 8) groups.push("0");
    groups.push(...tail);
  }
  return `${groups.slice(0, 4).join(":")}::/64`;
}
