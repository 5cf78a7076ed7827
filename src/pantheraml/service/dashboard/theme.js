// Applies the chosen theme before the first paint; "" follows the system.
const chosen = localStorage.getItem("theme") ?? "";
if (chosen) document.documentElement.dataset.theme = chosen;
