"""What a plan is made from: devices, models, step times, acceptance, traffic."""
