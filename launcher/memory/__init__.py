"""What a job will hold on each device and host, in closed form, without torch."""
