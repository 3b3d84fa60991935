import { expect, test } from "vitest";
import { remoteAddressKey } from "./remote-address.js";

test.each([
  ["10.0.0.7", "10.0.0.7"],
  ["::ffff:10.0.0.7", "10.0.0.7"],
  ["2001:db8:0:1:aaaa:bbbb:cccc:dddd", "2001:db8:0:1::/64"],
  ["2001:db8::1", "2001:db8:0:0::/64"],
  ["::1", "0:0:0:0::/64"],
  ["fe80::1%eth0", "fe80:0:0:0::/64"],
])("connections from %s count for %s", (address, key) => {
  expect(remoteAddressKey(address)).toBe(key);
});
